"""Pictures in rows: the forms that users have them in, where they go in messages, and what is refused."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from covey.errors import DataError
from covey.tasks.dataset import build_prompts, load_rows, split_rows
from covey.tasks.pictures import Picture, pictures_in, placed, read_picture, rgb
from covey.types import PICTURES, IntArray
from fakes import raises

PIXELS: NDArray[Any] = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
IMAGE = Image.fromarray(PIXELS)
ASKED = [{"role": "system", "content": "Look."}, {"role": "user", "content": "What?"}]


def file(kind: str = "PNG", **how: Any) -> bytes:
    content = io.BytesIO()
    IMAGE.save(content, kind, **how)
    return content.getvalue()


def grey16() -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.zeros((2, 2), np.uint16)).save(content, "PNG")
    return content.getvalue()


class Words:
    """A tokenizer of one id a character; a part with a picture is the id 7."""

    chat_template = "any"

    def apply_chat_template(self, messages: Any, tokenize: bool = True, **_: Any) -> Any:
        ids: list[int] = []
        for message in messages:
            parts = message["content"]
            for part in [{"type": "text", "text": parts}] if isinstance(parts, str) else parts:
                ids += [7] if part["type"] == "image" else [*part["text"].encode()]
        return ids if tokenize else bytes(ids).decode()

    def __call__(self, text: str) -> Any:
        return {"input_ids": [*text.encode()]}

    def decode(self, ids: Any) -> str:
        return " ".join(map(str, ids))


class TwoPlaces:
    """An album in which a picture has two places; the first number of its hash tells it apart."""

    placeholder_id = 7

    def expand(self, ids: IntArray, pictures: Any) -> IntArray:
        if (ids == 7).sum() != len(pictures):
            raise DataError(f"{(ids == 7).sum()} times '<image>' for {len(pictures)} pictures")
        waiting = iter(pictures)
        made = [[PICTURES + int(next(waiting).sha256[:4], 16)] * 2 if i == 7 else [i] for i in ids.tolist()]
        return np.array([i for part in made for i in part], np.int64)

    def placeholders(self, ids: IntArray) -> IntArray:
        return np.where(ids >= PICTURES, 7, ids)


def prompts(*rows: dict[str, Any], **how: Any) -> Any:
    return build_prompts(load_rows(list(rows)), Words(), album=TwoPlaces(), **how)


def test_every_form_is_the_same_picture(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(file())
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": ASKED, "image": "a.png"}))
    (from_file,) = load_rows(tmp_path / "data.jsonl")
    url = "data:image/png;base64," + base64.b64encode(file()).decode()
    forms = (file(), {"bytes": file(), "path": None}, {"bytes": None, "path": str(tmp_path / "a.png")}, url)
    found = [read_picture(form, "here") for form in forms]
    assert {*found, from_file["image"]} == {found[0]}
    assert (found[0].size, found[0].ending) == ((6, 4), "png")
    for form in (IMAGE, PIXELS, found[0], IMAGE.convert("RGBA")):
        assert (np.asarray(read_picture(form, "here").open()) == PIXELS).all()
    kept = read_picture(file("JPEG"), "here")
    assert (kept.ending, kept.data) == ("jpg", file("JPEG"))
    assert read_picture(file("BMP"), "here").ending == "png"
    assert "sha256" in repr(kept)
    assert len(repr(kept)) < 150  # neither a log nor an error has the file in it


def test_what_is_transparent_is_white() -> None:
    """As transformers' processors have it; its colour below is often black."""
    clear: NDArray[Any] = np.dstack([PIXELS, np.zeros((4, 6), np.uint8)])
    clear[0, 0, 3] = 255
    pen = io.BytesIO()
    Image.fromarray(clear).save(pen, "PNG")
    wanted = np.full((4, 6, 3), 255, np.uint8)
    wanted[0, 0] = PIXELS[0, 0]
    for form in (clear, Image.fromarray(clear), pen.getvalue()):
        assert (np.asarray(rgb(read_picture(form, "here").open())) == wanted).all()
    palette = Image.fromarray(np.array([[0, 1]], np.uint8), "L").convert("P")
    palette.save(pen := io.BytesIO(), "PNG", transparency=0)
    assert np.asarray(rgb(read_picture(pen.getvalue(), "here").open())).tolist() == [[[255] * 3, [1] * 3]]


@pytest.mark.parametrize(("tag", "size"), [(6, (4, 6)), (3, (6, 4)), (9, (6, 4))])  # 9 means nothing
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "MPO"])  # MPO: a phone's JPEG with a second picture
def test_a_photo_is_turned_as_the_camera_was_held(kind: str, tag: int, size: tuple[int, int]) -> None:
    told = Image.Exif()
    told[0x0112] = tag
    more = {"save_all": True, "append_images": [IMAGE]} if kind == "MPO" else {}
    photo = file(kind, exif=told.tobytes(), **more)
    wanted = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(photo))))
    for form in (photo, Image.open(io.BytesIO(photo))):
        turned = read_picture(form, "here")
        assert turned.size == turned.open().size == size
        assert (np.asarray(turned.open()) == wanted).all()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"\x89PNG", "cannot be read .*Unidentified"),
        (file()[:45], "cannot be read"),
        ("https://example.org/a.png", "nothing is fetched; download it"),
        ("nowhere.png", "is no file; paths are relative to the data file"),
        ("data:image/png;base64,%%%", "its data: URL is not base64"),
        ([[0, 255]], "is a list; give a PIL image"),
        (np.zeros((2, 2, 7), np.uint8), "cannot be read .*; give a PNG, .* or an array"),
        (np.zeros(9, np.uint8), "is a ndarray; give a PIL image"),
        (np.zeros((2, 2), np.uint16), "mode I;16 has more than 8 bits; scale it to 8"),
        (Image.new("F", (2, 2)), "mode F has more than 8 bits"),
        (grey16(), "mode I;16 has more than 8 bits"),
    ],
)
def test_what_cannot_be_read(value: Any, words: str) -> None:
    raises(DataError, f"row 1: picture 0.*{words}", load_rows, [{"prompt": ASKED}, {"prompt": ASKED, "image": [value]}])


def test_a_picture_that_is_too_large() -> None:
    large = io.BytesIO()
    Image.new("1", (8001, 8000)).save(large, "PNG")
    raises(DataError, "8001 x 8000 pixels, more than 64,000,000", read_picture, large.getvalue(), "here")
    Image.new("1", (14_000, 14_000)).save(large := io.BytesIO(), "PNG")
    raises(DataError, "cannot be read .*Decompression", read_picture, large.getvalue(), "here")


def test_pictures_go_where_trl_puts_them() -> None:
    one, two = read_picture(IMAGE, "a"), read_picture(PIXELS[:2], "b")
    text = {"type": "text", "text": "What?"}

    def parts(content: Any, row: dict[str, Any]) -> list[Any]:
        found = placed(content, row, "row 0")
        assert isinstance(found, list)
        return [part.get("image", part.get("text")) for message in found for part in message["content"]]

    again: Any = [*ASKED, {"role": "assistant", "content": "A"}, {"role": "user", "content": "B"}]
    assert parts(again, {"images": [one, two]}) == ["Look.", one, two, "What?", "A", "B"]
    assert parts(again, {"image": one}) == ["Look.", one, "What?", "A", "B"]
    filled = [
        {"role": "user", "content": [{"type": "image"}, text, {"type": "image", "image": two}, {"type": "image"}]}
    ]
    assert parts(filled, {"images": [one, one]}) == [one, "What?", two, one]
    for nothing in ({}, {"images": []}, {"images": None}, {"image": None}):
        assert placed(ASKED, nothing, "row 0") is ASKED


def test_prompts_with_pictures() -> None:
    for nothing in ("", [], [None], {"bytes": None, "path": None}):
        assert not prompts({"prompt": ASKED, "image": nothing})[0].has_pictures
    with_one = {"prompt": ASKED, "images": [IMAGE], "answer": "x"}
    shown, plain = prompts(with_one, {"prompt": ASKED, "images": None, "answer": "y"})
    (seen,) = pictures_in(shown.content)
    place = PICTURES + int(seen.sha256[:4], 16)
    assert shown.token_ids.tolist() == [*b"Look.", place, place, *b"What?"]
    assert shown.columns == {"images": [seen], "answer": "x"}
    assert shown.has_pictures
    assert (plain.content, plain.has_pictures) == (ASKED, False)
    own = {"prompt": [{"role": "user", "content": [{"type": "image", "image": IMAGE}, {"type": "text", "text": "?"}]}]}
    (inside,) = prompts(own)
    assert inside.token_ids.tolist() == [place, place, *b"?"]


def test_a_row_whose_pictures_do_not_fit() -> None:
    begun = [{"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "?"}]}]
    good = {"prompt": ASKED, "images": [IMAGE]}
    for row, words in (
        ({"prompt": begun, "images": [IMAGE]}, "places for 2 pictures, column 'images' holds 1; give one for"),
        ({"prompt": begun}, "places for 2 pictures, column 'images' holds 0"),
        (
            {"prompt": [{"role": "assistant", "content": "A"}], "image": IMAGE},
            "'image' holds 1; give a message of the user",
        ),
        ({"prompt": "What?", "images": [IMAGE]}, "a prompt with pictures must be a conversation"),
        ({"prompt": [{"role": "user", "content": "\x07?"}]}, "1 times '<image>' for 0 pictures"),
        ({"prompt": [{"role": "user", "content": "\x07?"}], "image": IMAGE}, "2 times '<image>' for 1 pictures"),
        (
            {"prompt": ASKED, "image": "charts/17"},
            "'image' holds 'charts/17', which is no picture; give the path",
        ),
        ({"prompt": ASKED, "images": [None, "charts"]}, "column 'images' holds .*, which is no picture"),
        ({"prompt": ASKED, "image": 17}, "column 'image' holds 17, which is no picture"),
        ({"prompt": [{"role": "user", "content": "?", "images": [IMAGE]}]}, "a key of pictures; give them in the row"),
    ):
        raises(DataError, f"row 1.*{words}", prompts, good, row)
    rows = load_rows([good])
    words = r"row 0 has pictures \(column 'images'\), and the model reads none: they would be ignored"
    raises(DataError, words, build_prompts, rows, Words())


def test_a_prompt_that_is_too_long_is_dropped_and_never_cut() -> None:
    long, short = {"prompt": ASKED, "images": [IMAGE] * 9}, {"prompt": ASKED, "images": [IMAGE]}
    words = r"28 tokens, 18 of them for pictures \(data.processor_kwargs .*\), more than data.max_prompt_length=20"
    raises(DataError, words, prompts, long, short, max_prompt_length=20)
    assert len(prompts(long, short, max_prompt_length=20, long_prompts="drop")) == 1
    cut = {"max_prompt_length": 20, "long_prompts": "truncate"}
    raises(DataError, "'truncate': it would cut pictures", lambda: prompts(long, **cut))
    text = {"prompt": [{"role": "user", "content": "a" * 30}]}
    assert [len(prompt.token_ids) for prompt in prompts(short, text, **cut)] == [12, 20]


def test_held_out_rows_are_told_apart_by_their_pictures() -> None:
    rows = load_rows([{"prompt": ASKED, "image": PIXELS + n} for n in range(8)])
    train, held_out = split_rows(rows, 0.25, "prompt")
    assert (len(train), len(held_out)) == (6, 2)
    assert all(isinstance(row["image"], Picture) for row in train)
