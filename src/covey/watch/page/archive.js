// A page that was sent as one file (`covey report RUN`) holds its answers itself and asks nobody.

const held = document.getElementById("archive");

/** What the file holds: `answers` by question, and a `note` on what was left out; null where there is a server. */
export const archive = held && JSON.parse(held.textContent);

const LATER = new Set(["start", "mark", "offset"]);
const FILTERS = ["search", "shown", "uid", "ended", "reward_from", "reward_to", "length_from", "length_to"];

/** The server's answer, as far as it is held. */
export function fromArchive(path, parameters) {
  if (path === "describe") return archive.answers.describe ?? {};
  const file = /^\d+\/(metrics|events|questions)$/.test(path);
  if (file && Number(parameters.start) > 0) {
    return { names: [], rows: [], lines: [], end: parameters.start, mark: "", restarted: false, damaged: 0, more: false };
  }
  if (path.endsWith("/overview")) return { names: [], rows: [] };
  if (path.endsWith("/prompts")) {
    const { groups } = fromArchive(path.replace("prompts", "completions"), { kind: "step", step: parameters.step });
    return Object.fromEntries(groups.map(({ uid, prompt }) => [uid, prompt.at(-1)?.content ?? ""]));
  }
  if (path.endsWith("/search")) return searched(path.split("/")[0], parameters);
  const given = Object.entries(parameters).filter(([name, value]) => !LATER.has(name) && !FILTERS.includes(name) && value !== "");
  const key = [path, ...given.map(([name, value]) => `${name}=${value}`).sort()].join(" ");
  const found = archive.answers[key];
  if (!found) throw new Error("This report does not hold it. Ask its sender for the run folder.");
  if (path.endsWith("/completions")) return filtered(found, parameters);
  if (path.endsWith("/compare")) return chosen(found, parameters.shown);
  return found;
}

function filtered(found, parameters) {
  const groups = found.groups
    .filter((group) => (!parameters.uid || group.uid === parameters.uid) && (parameters.shown !== "tied" || group.tied) && (parameters.shown !== "mixed" || !group.tied))
    .map((group) => ({ ...group, rows: group.rows.filter((row) => holds(row, group, parameters)) }))
    .filter((group) => group.rows.length);
  return { ...found, found: groups.length, groups };
}

function holds(row, group, { search = "", shown, ended, ...bounds }) {
  const within = (name) => [bounds[`${name}_from`], bounds[`${name}_to`]].every((bound, at) =>
    bound === undefined || bound === "" || (row[name] !== null && (at ? row[name] <= bound : row[name] >= bound)));
  const text = [row.completion, ...group.prompt.map((message) => message.content)].join("\n").toLowerCase();
  const shows = { right: row.correct === true, wrong: row.correct === false, masked: Boolean(row.masked_by),
    truncated: row.finish_reason === "length" || ["turns", "context"].includes(row.ended) };
  return (shows[shown] ?? true) && text.includes(search.toLowerCase()) && (!ended || [row.finish_reason, row.ended].includes(ended))
    && within("reward") && within("length");
}

function chosen(found, shown) {
  const pairs = found.pairs.filter(({ what }) => shown === "all" || what === shown || (shown === "changed" && ["gained", "lost"].includes(what)));
  return { ...found, pairs, found: pairs.length };
}

function searched(run, parameters) {
  const kind = parameters.kind ?? "step";
  const hits = [];
  const steps = [...archive.answers[`${run}/tables`][kind]].reverse();
  for (const step of steps) {
    for (const group of fromArchive(`${run}/completions`, { ...parameters, kind, step }).groups) {
      for (const row of group.rows) {
        const at = row.completion.toLowerCase().indexOf(parameters.search.toLowerCase());
        hits.push({ step, group: group.group, row: row.row, uid: group.uid, reward: row.reward, correct: row.correct, length: row.length,
          ended: row.finish_reason || row.ended, excerpt: at < 0 ? "" : row.completion.slice(Math.max(0, at - 80), at + parameters.search.length + 80) });
      }
    }
  }
  return { hits, looked: steps.length, left: 0, before: null, unread: 0 };
}
