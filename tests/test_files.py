import errno
import json
import os
from pathlib import Path

import pytest
from tiny_models import tiny_model, tiny_tokenizer
from transformers import AutoConfig, AutoTokenizer

from covey import files
from covey.errors import RunFolderError


def names_in(folder):
    return sorted(entry.name for entry in folder.iterdir())


def publish(final, text, name="a.txt"):
    with files.publishing(final) as aside:
        (aside / name).write_text(text)
    return final


def test_write_atomically_replaces_the_content(tmp_path):
    path = tmp_path / "a.txt"
    files.write_atomically(path, "first")
    files.write_atomically(path, b"second")
    assert path.read_bytes() == b"second"
    files.write_atomically(path, "a\ud800b")  # text that is no unicode does not stop it
    assert (path.read_text(), names_in(tmp_path)) == ("a?b", ["a.txt"])


@pytest.mark.parametrize(
    ("number", "reason", "fix"),
    [
        (errno.ENOSPC, "the disk is full", "free some space"),
        (errno.EACCES, "permission denied", "choose another run.output_dir"),
        (errno.EROFS, "read-only", "choose another run.output_dir"),
        (errno.EIO, "input/output error", "check the disk"),
    ],
)
def test_a_failed_write_keeps_the_old_content_and_says_why(tmp_path, monkeypatch, number, reason, fix):
    def fail(*_args, **_kwargs):
        raise OSError(number, os.strerror(number))

    path = tmp_path / "a.txt"
    files.write_atomically(path, "old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RunFolderError) as caught:
        files.write_atomically(path, "new")
    message = str(caught.value)
    assert message.startswith(f"{path}: cannot write: ")
    assert all(words in message for words in (reason, fix))
    assert (caught.value.errno, path.read_text(), names_in(tmp_path)) == (number, "old", ["a.txt"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_a_really_full_device_is_reported():
    with pytest.raises(RunFolderError, match="the disk is full"), files.explained(Path("/dev/full")):
        Path("/dev/full").write_text("x")


def test_published_folder_carries_the_hashes_of_its_files(tmp_path):
    final = tmp_path / "model"
    with files.publishing(final) as aside:
        assert not final.exists()
        (aside / "inner").mkdir()
        (aside / "inner" / "b.bin").write_bytes(b"abc")
        (aside / "a.txt").write_text("hello")
    manifest = json.loads((final / "COMPLETE").read_text())["files"]
    # sha256("abc"), FIPS 180-2 appendix B.1
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert (manifest["inner/b.bin"], sorted(manifest)) == ({"bytes": 3, "sha256": expected}, ["a.txt", "inner/b.bin"])
    assert (files.folder_problem(final), names_in(tmp_path)) == ("", ["model"])


def test_damage_is_named(tmp_path):
    final = publish(tmp_path / "model", "hello")
    (final / "a.txt").write_text("jello")
    assert "a.txt has changed" in files.folder_problem(final)
    assert files.folder_problem(final, hashes=False) == ""
    (final / "a.txt").write_text("hell")
    assert "a.txt has 4 bytes, not the 5" in files.folder_problem(final, hashes=False)
    (final / "a.txt").unlink()
    assert "a.txt is missing" in files.folder_problem(final)
    for damaged in ("", "[]", '{"files": 3}', '{"files": {"a.txt": null}}', "\x00\x00"):
        (final / "a.txt").write_text("hello")
        (final / "COMPLETE").write_text(damaged)
        assert "COMPLETE file is damaged" in files.folder_problem(final), damaged
    (final / "COMPLETE").unlink()
    assert "no COMPLETE file" in files.folder_problem(final)
    assert "no such folder" in files.folder_problem(tmp_path / "nowhere")


def test_publishing_again_replaces_the_folder_and_a_block_that_raises_does_not(tmp_path):
    final = publish(tmp_path / "model", "oldest", "old.txt")
    publish(final, "old")
    assert names_in(final) == ["COMPLETE", "a.txt"]

    def fail_half_way():
        with files.publishing(final) as aside:
            (aside / "a.txt").write_text("new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert ((final / "a.txt").read_text(), names_in(tmp_path)) == ("old", ["model"])


def test_a_rename_that_fails_puts_the_old_folder_back(tmp_path, monkeypatch):
    final, rename, calls = publish(tmp_path / "model", "old"), os.rename, []

    def fail_on_second(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError(errno.EIO, "broken")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_on_second)
    with pytest.raises(RunFolderError, match="input/output"):
        publish(final, "new")
    assert (len(calls), (final / "a.txt").read_text()) == (3, "old")


def test_leftovers_are_cleared_and_an_interrupted_replacement_is_undone(tmp_path):
    (tmp_path / "a.txt.tmp-123-0123abcd").write_text("half")
    (tmp_path / "step_000004.tmp-123-0123abcd").mkdir()
    (tmp_path / "best.tmp-123-0123abcd-replaced").mkdir()
    (tmp_path / "best.tmp-123-0123abcd-replaced" / "keep").write_text("me")
    (tmp_path / "kept.tmp-notes").write_text("not ours")
    assert files.is_leftover(tmp_path / "a.txt.tmp-123-0123abcd")
    assert not files.is_leftover(tmp_path / "kept.tmp-notes")
    assert (len(files.remove_leftovers(tmp_path)), names_in(tmp_path)) == (3, ["best", "kept.tmp-notes"])
    assert ((tmp_path / "best" / "keep").read_text(), files.remove_leftovers(tmp_path)) == ("me", [])
    (tmp_path / "best.tmp-123-0123abcd-replaced").mkdir()  # dropped where the new one is there
    files.remove_leftovers(tmp_path)
    assert (names_in(tmp_path), (tmp_path / "best" / "keep").read_text()) == (["best", "kept.tmp-notes"], "me")


def test_free_space_is_checked_with_both_numbers(tmp_path):
    files.require_free_space(tmp_path / "not" / "yet", 1, "the run")
    with pytest.raises(RunFolderError, match=r"B free, but the run needs about 1000000\.0 GB") as caught:
        files.require_free_space(tmp_path / "not" / "yet", 10**15, "the run")
    assert caught.value.errno == errno.ENOSPC


def test_a_sampled_hash_sees_both_ends_and_the_length(tmp_path):
    file = tmp_path / "weights"
    for length in (0, 1, 1 << 20, (1 << 20) + 1, 3 << 20, 40 << 20):
        held = bytearray(length)
        file.write_bytes(held)
        first = files.sampled_hash([file])
        assert files.sampled_hash([file]) == first
        for place in {0, length - 1} if length else ():
            held[place] ^= 1
            file.write_bytes(held)
            assert files.sampled_hash([file]) != first
            held[place] ^= 1
        file.write_bytes(bytes(length + 1))
        assert files.sampled_hash([file]) != first


def test_tokenizers_and_configs_are_for_readers_of_any_version(tmp_path):
    """Transformers 4 knows no TokenizersBackend, calls `.keys()` on extra_special_tokens, and reads `rope_theta`."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    model.config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    model.config.save_pretrained(tmp_path)
    files.save_tokenizer(tokenizer, tmp_path)
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert saved["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert isinstance(saved.get("extra_special_tokens", {}), dict)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["rope_theta"], config["rope_scaling"]) == (5e5, {"rope_type": "linear", "factor": 2.0})
    again = AutoTokenizer.from_pretrained(tmp_path)  # and version 5 reads what it wrote
    assert again("say one")["input_ids"] == tokenizer("say one")["input_ids"]
    assert again.all_special_ids == tokenizer.all_special_ids
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == model.config.rope_parameters

    class Own:
        def save_pretrained(self, folder):
            Path(folder, "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')

    files.save_tokenizer(Own(), tmp_path)  # a class of its own is kept
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == {"tokenizer_class": "Qwen2Tokenizer"}
