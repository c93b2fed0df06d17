"""Ask a trained model that is served, with the prompt that it was trained with.

covey export runs/appointments appointments-model
covey serve appointments-model &
python recipes/appointments/ask.py "Tea with Ana on Friday at 8:30 in the evening."
"""

from __future__ import annotations

import argparse
import json
import sys

import httpx
from appointments import ASK, read


def main() -> None:
    """Print an entry for each sentence, or say that there is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sentences", nargs="+")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    args = parser.parse_args()
    try:
        with httpx.Client(base_url=args.url, timeout=60) as server:
            model = server.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            for sentence in args.sentences:
                asked = {"model": model, "max_tokens": 56, "temperature": 0}
                asked |= {"messages": [{"role": "user", "content": ASK.format(sentence=sentence)}]}
                reply = server.post("/v1/chat/completions", json=asked).raise_for_status().json()
                text = reply["choices"][0]["message"]["content"]
                entry = read(text)
                sys.stdout.write((json.dumps(entry) if entry else f"no entry: {text!r}") + "\n")
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise SystemExit(f"{args.url}: {error!r}; is covey serve running there?") from None


if __name__ == "__main__":
    main()
