"""Text encoders: the embedded one bit for bit, the pretrained ones on tiny real models with a tokenizer made here."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from megatron_dsv.data.text import (
    HashTextEncoder,
    TextEncoderOptions,
    TransformersTextEncoder,
    build_text_encoder,
    text_encoder_from_description,
    transformers_t5,
)

WORDS = ["<pad>", "</s>", "<unk>", "a", "red", "bicycle", "in", "the", "park"]


@pytest.fixture(scope="module", params=["T5", "UMT5"])
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    folder = tmp_path_factory.mktemp(request.param)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>",
                                         unk_token="<unk>").save_pretrained(folder)
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(vocab_size=len(WORDS), d_model=16, d_kv=4, d_ff=32,
                                                             num_layers=2, num_heads=4)
    getattr(transformers, f"{request.param}EncoderModel")(config).save_pretrained(folder)
    return folder


def test_pretrained_embeddings_are_the_models_own_without_padding(model_folder: Path) -> None:
    encoder = build_text_encoder("transformers", TextEncoderOptions(folder=model_folder, max_tokens=6))
    long, short = encoder.encode(["a red bicycle in the park", ""])
    import transformers

    model = getattr(transformers, model_folder.name.rstrip("0123456789") + "5EncoderModel"
                    ).from_pretrained(model_folder, local_files_only=True)
    with torch.no_grad():
        for got, ids in ((long, [3, 4, 5, 6, 7, 1]), (short, [1])):
            expected = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert encoder.is_truncated("a red bicycle in the park")
    assert not encoder.is_truncated("a red bicycle in the")


def test_pretrained_description_finds_the_files_and_notices_others(model_folder: Path, tmp_path: Path) -> None:
    encoder = TransformersTextEncoder(model_folder, max_tokens=5)
    description = json.loads(json.dumps(encoder.describe()))
    again = text_encoder_from_description(description)
    assert torch.equal(again.encode(["the park"])[0], encoder.encode(["the park"])[0])
    assert (again.dim, again.max_tokens) == (16, 5)
    description["fingerprint"] = "0" * 64
    with pytest.raises(ValueError, match="--text-folder must hold the files that made the embeddings"):
        text_encoder_from_description(description)
    with pytest.raises(ValueError, match="--text-tokenizer must be a folder with a tokenizer's files"):
        TransformersTextEncoder(model_folder, tmp_path)


def test_a_folder_of_weights_and_tokenizer_is_read_once(model_folder: Path, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def fingerprint(folder: Path) -> str:
        read.append(folder)
        return folder.name

    monkeypatch.setattr(transformers_t5, "folder_fingerprint", fingerprint)
    TransformersTextEncoder(model_folder).describe()
    assert read == [model_folder]
    shutil.copytree(model_folder, tmp_path / "tokenizer")
    description = TransformersTextEncoder(model_folder, tmp_path / "tokenizer").describe()
    assert (description["fingerprint"], description["tokenizer_fingerprint"]) == (model_folder.name, "tokenizer")


@pytest.mark.parametrize(("config", "error", "message"), [
    (None, ValueError, "--text-folder must be a folder with the config.json and weights of a UMT5 or T5 encoder"),
    ('{"model_type": "bert"}', NotImplementedError, "--text-folder holds a model of type bert; supported are t5, umt5"),
    ('{"model_type": "t5"}', ValueError, "cannot be loaded as t5: "),
])
def test_unusable_model_folders_are_named(tmp_path: Path, config: str | None, error: type, message: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(error, match=message):
        TransformersTextEncoder(tmp_path)


def signs(ngram: str, dim: int) -> list[int]:
    digest = hashlib.shake_256(ngram.encode()).digest(dim // 8)
    return [1 if digest[i // 8] >> (7 - i % 8) & 1 else -1 for i in range(dim)]


def test_hash_vectors_are_the_documented_sums() -> None:
    encoder = HashTextEncoder(dim=16, max_tokens=8)
    (text,) = encoder.encode(["Red CAR"])
    expected = []
    for token, before in (("red", ""), ("car", "red"), ("\x03", "car")):
        ngrams = [f"word {token}"] * 2 + [f"pair {before} {token}"]
        bounded = f"<{token}>"
        ngrams += [f"part {bounded[i:i + 3]}" for i in range(len(bounded) - 2)]
        total = [sum(column) for column in zip(*(signs(ngram, 16) for ngram in ngrams))]
        norm = math.sqrt(sum(value * value for value in total))
        expected.append([value / norm for value in total])
    assert torch.equal(text, torch.tensor(expected, dtype=torch.float64).float())


def test_hash_is_the_same_on_every_machine() -> None:
    text = HashTextEncoder().encode(["Ein Fahrrad im Park, 公园"])[0]
    assert hashlib.sha256(text.numpy().tobytes()).hexdigest() == \
        "710cd03813e9289884b68b8850c623c417e8da8a507f054737f4ee8426348498"


def test_hash_vectors_keep_likeness_and_difference() -> None:
    encoder = HashTextEncoder(dim=512)
    dog, dogs, cat = (encoder.encode([word])[0][0] for word in ("dog", "dogs", "elephant"))
    assert torch.dot(dog, dogs) > torch.dot(dog, cat) + 0.1
    one, other = encoder.encode(["man bites dog", "dog bites man"])
    assert not torch.allclose(one[1], other[1])
    assert torch.allclose(one.norm(dim=1), torch.ones(4))


def test_hash_lengths_and_the_empty_text() -> None:
    encoder = HashTextEncoder(dim=8, max_tokens=3)
    assert [row.shape[0] for row in encoder.encode(["", "one", "one two", "one two three"])] == [1, 2, 3, 3]
    assert [encoder.is_truncated(text) for text in ("one two", "one two three")] == [False, True]
    again = text_encoder_from_description(encoder.describe())
    assert torch.equal(again.encode(["one two"])[0], encoder.encode(["one two"])[0])


@pytest.mark.parametrize(("call", "message"), [
    (lambda: HashTextEncoder(dim=12), "--text-dim must be a positive multiple of 8 for text encoder hash, got 12"),
    (lambda: HashTextEncoder(max_tokens=0), "--text-max-tokens must be at least 1, got 0"),
    (lambda: build_text_encoder("clip"), "--text-encoder must be one of hash, transformers, got clip"),
    (lambda: build_text_encoder("hash", TextEncoderOptions(folder="x")), "--text-folder must be left out"),
    (lambda: build_text_encoder("transformers"), "--text-folder must name a folder with a model"),
    (lambda: build_text_encoder("transformers", TextEncoderOptions(dim=8, folder="x")), "--text-dim is set by the"),
    (lambda: text_encoder_from_description({"name": "hash", "version": 7}), "by version 7 of text encoder hash"),
    (lambda: text_encoder_from_description({"name": "clip"}), "text encoder must be one of hash, transformers, got"),
])
def test_misuse_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
