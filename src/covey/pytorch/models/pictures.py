"""Vision models: the language half, which is trained, and the album, which holds pictures for it.

    picture --tower, projector--> vectors of its places --+
                                                          +--> language half --> logits
    text ----embedding table----> vectors of its tokens --+

The language half is a causal LM of transformers that shares its tensors with the whole model. Tower and projector are
frozen.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
import transformers as hf
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, Qwen2Model, Qwen3Model
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.utils.hub import cached_file

from covey.adapters import PEFT_PREFIX, Adapter, read_adapter_folder
from covey.errors import ConfigError, DataError, ModelError
from covey.functions import nearest
from covey.pytorch.models.narrow import computing_dtype
from covey.pytorch.rounding import truth_and_own, unexplained
from covey.rollout.packing import Pack, pack_episodes
from covey.rollout.places import MOST_ROWS, PLACE_BITS, is_turned, place_ids, place_of, sequence_turns
from covey.tasks.pictures import Picture, read_picture, rgb
from covey.types import PICTURES, Episode, IntArray

SEEING = ("smolvlm", "idefics3", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Families whose pictures are read here."""
_MOST_PLACES = 1 << 14
_KEPT_BYTES = 2 << 30
"""Of vectors that are kept; pictures beyond them, the least recently used first, have another pass when needed."""
_INSIDE = ("text_model", "language_model")
_STRINGS_AS_PARTS = (
    "{%- set told = namespace(messages=[]) -%}{%- for message in messages -%}"
    "{%- set said = message.content -%}{%- if said is string -%}{%- set said = [{'type': 'text', 'text': said}] -%}"
    "{%- endif -%}{%- set told.messages = told.messages + [dict(message, content=said)] -%}"
    "{%- endfor -%}{%- set messages = told.messages -%}"
)


class Album:
    """The rest of a vision model beside its language half, and the pictures that are read. Copies of the half share it.

    A place in a picture is a token id of its own (`covey.rollout.places`), of a hash of the picture's file and the
    processor's settings. So equal pictures have equal ids in every run and process, and share tokens like equal words.

    Attributes:
        whole: the whole model, whose text part is the half's.
        prefix: what the half's `model.` is called in the whole model.
        tower: what makes vectors of pictures, with the projector.
        placeholder_id: the token that stands for each place in the checkpoint's own prompts.
        options: more arguments for the processor.
        passes: how often the tower was run.
        scores: how a policy finds log-probabilities `[U, V]` of a pack; compared in `check`.
    """

    def __init__(self, whole: PreTrainedModel, half: PreTrainedModel, inside: str, processor: Any) -> None:
        """`inside` names the text part, `processor` is one, or where to load it from ("" = nowhere)."""
        config: Any = whole.config
        self.whole, self.prefix = whole, f"model.{inside}."
        self.placeholder_id = int(getattr(config, "image_token_id", None) or config.image_token_index)
        self.options: dict[str, Any] = {}
        self.passes = 0
        self._half, self._given = half, processor
        self._deepens = bool(getattr(config.vision_config, "deepstack_visual_indexes", None))
        self.tower = [part for name, part in whole.base_model.named_children() if name != inside]
        self._pictures: WeakValueDictionary[int, Picture] = WeakValueDictionary()
        self._frames: dict[tuple[int, int], tuple[IntArray, int | None]] = {}  # by size, with the columns of places
        self._columns: dict[int, int] = {}
        self._vectors: OrderedDict[int, Tensor] = OrderedDict()
        self._lock = RLock()
        self._checked = False
        self.scores: Callable[[Pack], Tensor] | None = None

    def __deepcopy__(self, _: Any) -> Album:
        return self

    @property
    def reads(self) -> bool:
        """Whether pictures of the model's family are read here."""
        return self.whole.config.model_type in SEEING

    @cached_property
    def processor(self) -> Any:
        """The model's processor; `ModelError` where it cannot be loaded."""
        return self._given if isinstance(self._given, ProcessorMixin) else self._load(self._given)

    def changed(self, folder: Any) -> list[str]:
        """In what a processor that was passed treats pictures otherwise than the one of a folder or name."""
        if not isinstance(self._given, ProcessorMixin):
            return []
        both = [each.image_processor for each in (self._load(folder), self._given)]
        own, told = ({"class": type(one).__name__, **one.to_dict()} for one in both)
        return [name for name in told if told[name] != own.get(name)]

    def _load(self, source: str) -> Any:
        # SmolVLM's own processor does the same to pictures as Idefics3's, and needs packages for video.
        kind = self.whole.config.model_type
        tiles = kind in ("smolvlm", "idefics3")
        by: Any = hf.Idefics3Processor if tiles else QwenProcessor if "qwen" in kind else hf.AutoProcessor
        try:
            if not source:
                raise OSError("a built model names no folder")
            return by.from_pretrained(source)
        except Exception as error:  # transformers raises OSError, ValueError, ImportError, ...
            raise ModelError(
                f"{source or type(self.whole).__name__}: its processor cannot be loaded ({type(error).__name__}: "
                f"{error!s:.300}); save it beside the model, or pass it as processing_class"
            ) from error

    @cached_property
    def _settings(self) -> str:
        """What decides what a picture becomes, the same in every process."""
        told = [self.processor.image_processor.to_dict(), self.options, getattr(self.processor, "image_seq_len", None)]
        return json.dumps(told, sort_keys=True, default=str)

    def expand(self, ids: IntArray, pictures: Sequence[Picture]) -> IntArray:
        """A prompt `[P]` with one placeholder for each picture, with the ids of the pictures in their places.

        Raises `DataError`: there are other numbers of them; `ModelError`: the model's pictures are not read here.
        """
        at = np.flatnonzero(ids == self.placeholder_id)
        if len(at) != len(pictures):
            token = self.processor.tokenizer.convert_ids_to_tokens(self.placeholder_id)
            more = f"a text holds {token!r}, which stands for a picture; leave it out"
            why = more if len(at) > len(pictures) else "the chat template leaves pictures out; use the processor's own"
            raise DataError(f"{len(at)} times {token!r} for {len(pictures)} pictures: {why}")
        self.check()
        parts = np.split(ids, np.sort(np.concatenate([at, at + 1])))
        parts[1::2] = map(self.open, pictures)
        return np.concatenate(parts)

    def open(self, picture: Picture) -> IntArray:
        """The ids that stand for a picture, those of its frame included; they are known while the picture is held."""
        settings = self._settings
        if picture.size not in self._frames:
            from PIL import Image

            try:
                made = self._process(Image.new("RGB", picture.size))
            except Exception as error:  # processors raise what they like
                raise DataError("a picture of {:,} x {:,} pixels: {}".format(*picture.size, error)) from error
            grid = made.get("image_grid_thw")  # in patches, of which a place is a square
            columns = None if grid is None else int(grid[0][2]) // self.whole.config.vision_config.spatial_merge_size
            self._frames = self._frames if len(self._frames) < 1_000 else {}  # sizes may be a stranger's
            self._frames[picture.size] = np.asarray(made["input_ids"][0], np.int64), columns
        ids, columns = self._frames[picture.size]
        ids, places = ids.copy(), ids == self.placeholder_id
        if (count := int(places.sum())) > _MOST_PLACES:
            raise DataError(f"a picture of {count:,} places, more than {_MOST_PLACES:,}; make it smaller")
        if columns is not None and (longest := max(columns, count // columns)) > MOST_ROWS:
            raise DataError(f"a picture with {longest:,} places on a side, more than {MOST_ROWS:,}; make it smaller")
        digest = hashlib.sha256(f"{picture.sha256} {settings}".encode()).digest()
        ids[places] = own = place_ids(digest, count, columns)
        key = int(own[0]) >> PLACE_BITS
        if (known := self._pictures.setdefault(key, picture)) != picture:
            raise DataError(f"pictures {picture.sha256[:12]} and {known.sha256[:12]} have one key")
        self._columns[key] = columns or MOST_ROWS
        return ids

    def placeholders(self, ids: IntArray) -> IntArray:
        """Ids as the checkpoint knows them, the placeholder in place of what stands for places."""
        return np.where(ids >= PICTURES, self.placeholder_id, ids)

    def collapse(self, ids: IntArray) -> tuple[IntArray, list[Picture]]:
        """The inverse of `expand`: ids with one placeholder for each picture, and the pictures in order."""
        parts, pictures, end = [], [], 0
        for at in np.flatnonzero(ids >= PICTURES).tolist():
            if at >= end:
                pictures.append(picture := self._pictures[int(ids[at]) >> PLACE_BITS])
                span = self.open(picture)
                begin = at - int(np.argmax(span >= PICTURES))
                parts += [ids[end:begin], np.array([self.placeholder_id])]
                end = begin + len(span)
        return np.concatenate([*parts, ids[end:]]), pictures

    def unknown(self, ids: IntArray) -> bool:
        """Whether there are places of pictures that are not open."""
        keys = np.unique(ids[ids >= PICTURES] >> PLACE_BITS)
        return not all(key in self._pictures for key in keys.tolist())

    def shown_in(self, ids: Iterable[IntArray]) -> list[Picture]:
        """The open pictures of which there are places among token ids, to `hold` in another process."""
        keys = {key for each in ids for key in np.unique(each[each >= PICTURES] >> PLACE_BITS).tolist()}
        return [self._pictures[key] for key in sorted(keys)]

    def hold(self, pictures: Sequence[Picture]) -> None:
        """Open pictures of a step or a unit; what was held before is let go."""
        self._held = pictures
        for picture in pictures:
            self.open(picture)

    def embed(self, ids: Tensor, table: Callable[[Tensor], Tensor]) -> Tensor:
        """Token ids of any shape -> vectors, of tokens by the `table`, of places by the tower."""
        if not self._pictures or not (places := ids >= PICTURES).any():
            return table(ids)
        vectors = table(torch.where(places, 0, ids)).clone()
        vectors[places] = self.rows(ids[places])[0].to(vectors.dtype)
        return vectors

    def deep(self, ids: Tensor | None) -> Deep | None:
        """What the tower has for layers of its own, behind the embedding, for M token ids of any shape."""
        if ids is None or not self._deepens or not len(at := (ids.flatten() >= PICTURES).nonzero()[:, 0]):
            return None
        return Deep(at, self.rows(ids.flatten()[at])[1:])

    def rows(self, ids: Tensor) -> Tensor:
        """Ids of places `[n]` -> their vectors `[1 + D, n, d]`, first those to embed, then those of D layers. Each
        picture has a pass of its own, so that its bits do not depend on which others are known already.
        """
        keys, which = torch.unique(ids >> PLACE_BITS, return_inverse=True)
        tables = [self._vectors_of(key) for key in keys.tolist()]
        first = np.cumsum([0, *(table.shape[1] for table in tables[:-1])])
        columns = [self._columns[key] for key in keys.tolist()]
        begin, wide = (torch.tensor(each, device=ids.device)[which] for each in (first, columns))
        return torch.cat(tables, 1)[:, begin + place_of(ids, wide)]

    def _vectors_of(self, key: int) -> Tensor:
        with self._lock:
            if (picture := self._pictures.get(key)) is None:
                raise ModelError(f"a token id of the key {key:#x} is of no picture that is open here")
            if key not in self._vectors:
                self._vectors[key] = self._run(picture)
                while sum(each.nbytes for each in self._vectors.values()) > _KEPT_BYTES and len(self._vectors) > 1:
                    self._vectors.popitem(last=False)
            self._vectors.move_to_end(key)
            return self._vectors[key]

    def _run(self, picture: Picture) -> Tensor:
        """`[1 + D, n, d]` what tower and projector make of a picture."""
        self.passes += 1
        whole: Any = self.whole
        device = self._half.device
        for part in self.tower:
            part.to(device)
        pixels = self._pixels(picture)
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
            found = whole.base_model.get_image_features(**pixels, return_dict=True)
            parts = found.pooler_output, *(getattr(found, "deepstack_features", None) or ())
            width = int(self._half.config.hidden_size)
            vectors = torch.stack([torch.cat(list(part)).reshape(-1, width) for part in parts])
        if (made := vectors.shape[1]) != (wanted := int((self.open(picture) >= PICTURES).sum())):
            told = f"a picture has {wanted} places in the prompt, and the tower makes {made} vectors"
            raise ModelError(f"{told}; correct data.processor_kwargs, or the processor")
        return vectors

    def _pixels(self, picture: Picture) -> dict[str, Tensor]:
        made = self._process(rgb(picture.open()), return_tensors="pt")
        device, dtype = self._half.device, next(self.tower[0].parameters()).dtype
        of_text = ("input_ids", "attention_mask", "mm_token_type_ids")
        inputs = {name: value for name, value in made.items() if name not in of_text}
        return {name: x.to(device, dtype if x.is_floating_point() else x.dtype) for name, x in inputs.items()}

    def _process(self, image: Any, **how: Any) -> Any:
        token = self.processor.tokenizer.convert_ids_to_tokens(self.placeholder_id)
        return self.processor(text=[token], images=[[image]], add_special_tokens=False, **self.options, **how)

    def check(self) -> None:
        """Compare a small picture's logits with those of the checkpoint's own forward pass, once."""
        if self._checked:
            return
        whole: Any = self.whole
        name, source = whole.config.model_type, whole.config._name_or_path
        if not self.reads:
            raise ModelError(f"{source}: of a {name} model text is read here; pictures are read by {', '.join(SEEING)}")
        usual = self.processor.valid_processor_kwargs.__annotations__["images_kwargs"]
        own = getattr(self.processor.image_processor, "valid_kwargs", usual)
        taken = sorted({*usual.__annotations__, *own.__annotations__, "images_kwargs"})
        for wrong in sorted(self.options.keys() - {*taken}):
            raise ConfigError(f"data.processor_kwargs: the processor takes no {wrong!r}; {nearest(wrong, taken)}")
        if any(isinstance(part, BaseTunerLayer) for part in self._half.get_input_embeddings().modules()):
            told = "an adapter of the embedding knows words alone; with pictures, leave the embedding out"
            raise ConfigError(f"model.lora_target_modules: {told}")
        rng = np.random.default_rng(0)
        picture = read_picture(rng.integers(0, 256, (24, 40, 3), np.uint8), "a picture of noise")
        words = rng.integers(3, self.placeholder_id, (2, 5))
        try:
            ids = np.concatenate([words[0], self.open(picture), words[1]])
            self._pixels(picture)
        except ModelError:
            raise
        except Exception as error:  # processors raise what they like
            told = f"the processor cannot read a picture with them ({type(error).__name__}: {error!s:.300})"
            raise ConfigError(f"data.processor_kwargs={self.options}: {told}; correct them") from error
        wide, narrow = (torch.from_numpy(each)[None].to(self._half.device) for each in (ids, self.placeholders(ids)))

        @torch.no_grad()
        def logits(dtype: torch.dtype) -> Tensor:
            kinds = {"mm_token_type_ids": (narrow == self.placeholder_id).long()} if is_turned(ids) else {}
            out: Tensor = whole(input_ids=narrow, **self._pixels(picture), **kinds, use_cache=False).logits[0]
            return out.to(dtype).log_softmax(-1)

        with torch.no_grad():
            found = self._half(input_ids=wide, use_cache=False).logits[0]
        truth, own = truth_and_own(whole, computing_dtype(self._half), logits)
        problem = unexplained(found.to(truth.dtype).log_softmax(-1), own, truth)
        if self.scores is not None:
            last = np.arange(len(ids)) >= len(ids) - len(words[1])
            pack, *_ = pack_episodes([Episode(ids, last, np.zeros(len(ids), np.float32), "", "stop", 0)])
            at = pack.position_ids[pack.score_at]
            with torch.no_grad():
                problem = problem or unexplained(self.scores(pack), own[at], truth[at])
        if problem:
            raise ModelError(f"{source}: with a picture, the model's own code computes something else ({problem})")
        self._checked, self.passes = True, 0

    def save_processor(self, folder: str | Path) -> None:
        """Write what the processor is made of, and `options`, beside a tokenizer."""
        given = isinstance(self._given, ProcessorMixin)
        if given:
            self._given.save_pretrained(str(folder))
        for name in ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"):
            missing = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
            file = Path(folder) / name
            if not given and self._given and (own := cached_file(self._given, name, **missing)) is not None:
                shutil.copyfile(own, file)
            told = json.loads(file.read_bytes()) if file.is_file() else {}
            if self.options and "image_processor_type" in (pixels := told.get("image_processor", told)):
                pixels |= self.options
                file.write_text(json.dumps(told, indent=2), encoding="utf-8")

    def rename_saved(self, folder: str | Path) -> None:
        """Give a saved adapter of the half the whole model's names, so that it fits on that."""
        adapter = read_adapter_folder(folder)
        tensors = _renamed(adapter, "model.", self.prefix)
        modules = {name.removeprefix(PEFT_PREFIX).partition(".lora_")[0] for name in tensors if ".lora_" in name}
        kinds = sorted({re.sub(r"[.]\d+[.]", "<>", module) for module in modules})
        targets = "|".join(re.escape(kind).replace("<>", r"\.\d+\.") for kind in kinds)
        Adapter(tensors, {**adapter.config, "target_modules": targets}).write(folder)

    def adapter_of_half(self, adapter: Adapter) -> Adapter:
        """An adapter by the half's names, whose names may be the whole model's."""
        targets = adapter.config.get("target_modules")
        if isinstance(targets, str):
            targets = targets.replace(re.escape(self.prefix), re.escape("model."))
        return Adapter(_renamed(adapter, self.prefix, "model."), {**adapter.config, "target_modules": targets})


def _renamed(adapter: Adapter, old: str, new: str) -> dict[str, Any]:
    """An adapter's tensors with another beginning of their names below PEFT's."""
    old, new = f"^{re.escape(PEFT_PREFIX + old)}", PEFT_PREFIX + new
    return {re.sub(old, new, name): tensor for name, tensor in adapter.tensors.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Deep:
    """What places get after each of the first D layers (DeepStack, arXiv 2406.04334)."""

    at: Tensor  # [n] which of the M tokens
    rows: Tensor  # [D, n, d]

    def add(self, layer: int, x: Tensor) -> None:
        """Add it to what a layer has made of the M tokens, `[..., d]`, in place."""
        if layer < len(self.rows):
            x.view(-1, x.shape[-1]).index_add_(0, self.at, self.rows[layer].to(x.dtype))


class QwenProcessor(hf.Qwen2VLProcessor):
    """The processor of Qwen's vision models without what reads video, which needs torchvision."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


class _Turned:
    """A decoder whose tokens are turned by their ids. Positions of one axis are replaced; the rows are then whole."""

    album: Album

    def forward(self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **more: Any) -> Any:
        deep, plain = self.album.deep(input_ids), position_ids is None or position_ids.dim() == 2
        if plain and input_ids is not None and is_turned(ids := input_ids.cpu().numpy()):
            position_ids = torch.from_numpy(sequence_turns(*ids)).to(input_ids.device).view(3, *input_ids.shape)
            attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        told = more if deep is None else {**more, "deep": deep}
        return super().forward(input_ids, attention_mask, position_ids, **told)  # type: ignore[misc]


class _TurnedQwen2(_Turned, Qwen2Model):  # type: ignore[no-untyped-call]
    pass


class _TurnedQwen3(_Turned, Qwen3Model):  # type: ignore[no-untyped-call]
    pass


class _DeepLayer(Qwen3DecoderLayer):  # type: ignore[no-untyped-call]
    def forward(self, hidden_states: Tensor, deep: Deep | None = None, **more: Any) -> Tensor:  # type: ignore[override]
        made = super().forward(hidden_states, **more)
        if deep is not None:
            deep.add(int(self.self_attn.layer_idx), made)
        return made


_PLAIN: dict[str, Any] = {"qwen2_vl_text": _TurnedQwen2, "qwen2_5_vl_text": _TurnedQwen2, "qwen3_vl_text": _TurnedQwen3}
"""Text models whose layers are those of another family."""


class PlaceEmbedding(nn.Embedding):
    """An embedding that also knows the places of an album's pictures."""

    album: Album

    def forward(self, input: Tensor) -> Tensor:
        """Ids of any shape -> vectors."""
        return self.album.embed(input, super().forward)


def language_half(whole: Any, processor: Any = None) -> PreTrainedModel:
    """The text part of a vision model as a causal LM with the same tensors, which takes its place in the whole;
    `processor` is the model's, or where to load it from.
    """
    name = next(name for name in _INSIDE if hasattr(whole.model, name))
    inside, head = getattr(whole.model, name), whole.lm_head
    config = copy.deepcopy(inside.config)
    if plain := _PLAIN.get(config.model_type):
        rope = {key: value for key, value in (config.rope_parameters or {}).items() if not key.startswith("mrope")}
        kind = plain.config_class
        config = kind.from_dict({**config.to_dict(), "rope_parameters": rope, "model_type": kind.model_type})
    config.tie_word_embeddings = head.weight is inside.embed_tokens.weight
    config.dtype, config.architectures = inside.dtype, None
    config._name_or_path = whole.config._name_or_path
    config._attn_implementation = inside.config._attn_implementation
    with no_init_weights():
        make: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        half = make(config)
    half.model.load_state_dict(inside.state_dict(), assign=True)
    half.lm_head.load_state_dict(head.state_dict(), assign=True)
    half.tie_weights()
    half.generation_config = copy.deepcopy(whole.generation_config)
    whole.requires_grad_(False)
    half.requires_grad_(True)
    whole.lm_head = half.lm_head
    half.album = Album(whole.eval(), half, name, processor)
    if plain:
        half.model.rotary_emb, half.model.album = inside.rotary_emb, half.album
        half.model.__class__ = plain
        for layer in half.model.layers if plain is _TurnedQwen3 else ():
            layer.__class__ = _DeepLayer
    for part, module in half.model.named_children():
        setattr(inside, part, module)
    if whole.config.model_type in SEEING:
        half.model.embed_tokens.__class__ = PlaceEmbedding
        half.model.embed_tokens.album = half.album
    return half  # type: ignore[no-any-return]


def told_in_parts(given: Any, source: str) -> PreTrainedTokenizerBase:
    """A vision model's tokenizer, or its processor's; the chat template also renders contents that are text."""
    tokenizer: Any = copy.deepcopy(getattr(given, "tokenizer", given))
    tokenizer.chat_template = tokenizer.chat_template or getattr(given, "chat_template", None)
    file = Path(source) / "chat_template.json"  # of folders that transformers 4 wrote; tokenizers do not read it
    if tokenizer.chat_template is None and file.is_file():
        tokenizer.chat_template = json.loads(file.read_bytes())["chat_template"]
    told = ""
    with suppress(Exception):  # templates raise what they like
        told = str(tokenizer.apply_chat_template([{"role": "user", "content": "begun0"}], tokenize=False))
    if isinstance(tokenizer.chat_template, str) and "begun0" not in told:
        tokenizer.chat_template = _STRINGS_AS_PARTS + tokenizer.chat_template
    return tokenizer  # type: ignore[no-any-return]
