"""Draw the first ten held-out pictures with the answers before and after training: `grid.py RUN FILE.png`."""

from __future__ import annotations

import sys

from PIL import Image, ImageDraw, ImageFont

from covey.observe.run_folder import RunFolder
from covey.recipes.shapes.shapes import SIZE, Shapes

SCALE, WIDTH, HEIGHT, COLUMNS, PICTURES = 3, 168, 204, 5, 10


def main(run: str, file: str) -> None:
    """Each picture three times as large; below it the first and the last evaluation's answer, and the right one."""
    folder = RunFolder.read(run)
    steps = folder.completion_steps("eval")
    before, after = ({row["uid"]: row for row in folder.read_completions(n, "eval")} for n in (steps[0], steps[-1]))
    page = Image.new("RGB", (COLUMNS * WIDTH, PICTURES // COLUMNS * HEIGHT), "white")
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(size=14)
    for at, row in enumerate(Shapes().eval_rows()[:PICTURES]):
        x, y = at % COLUMNS * WIDTH + 12, at // COLUMNS * HEIGHT + 8
        large = row["image"].resize((SIZE * SCALE, SIZE * SCALE), Image.Resampling.NEAREST)
        page.paste(large, (x, y))
        for line, (name, said) in enumerate((("before", before[str(at)]), ("after", after[str(at)]))):
            colour = "darkgreen" if said["correct"] else "darkred"
            pen.text((x, y + 148 + 16 * line), f"{name}: {said['completion']!s:.9}", colour, font)
        pen.text((x + 106, y + 156), f"is {row['answer']}", "black", font)
    page.quantize(64).save(file, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
