import json
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from p2q.checkpoint import open_checkpoint
from p2q.convert import Part, convert
from p2q.errors import CheckpointError, P2QError, ScaleError, TargetError
from p2q.manifest import MANIFEST_NAME, changed_files, digest_of_files, read_manifest, sha256_of
from p2q.scales import RULES, Rule

Make = Callable[..., Path]
Tree = Callable[[Path], dict[str, str]]
Threads = Callable[[int], AbstractContextManager[None]]
Tensors = dict[str, torch.Tensor]
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
A, B, C = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))


def load(checkpoint: Path) -> Tensors:
    shards = open_checkpoint(checkpoint).shards
    return {name: tensor for shard in shards for name, tensor in load_file(checkpoint / shard).items()}


# What else a checkpoint holds


def test_convert_bytes_that_are_not_quantized_stay(make_checkpoint: Make, w8a8: Tensors, tmp_path: Path) -> None:
    w8a8 |= {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "flags": torch.tensor([True, False, True]),
        "table": torch.arange(5, dtype=torch.int8),
        "f8": torch.ones(3).to(torch.float8_e4m3fn),
        "complex": torch.tensor([1 + 2j]),
        f"{UP}.weight_zero_point": torch.zeros(6, 1, dtype=torch.int8),
        f"{UP}.bias": torch.tensor([float("nan"), float("inf"), -0.0, 1, 2, 3]),
        "nested." * 2000 + "weight": torch.ones(2, 2),
    }
    source = make_checkpoint(w8a8, metadata={"format": "pt", "b": "ünï", "a": "1"})
    convert(source, tmp_path / "target")
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "target")
    assert after.shards["model.safetensors"].header == before.shards["model.safetensors"].header
    data = [(path / "model.safetensors").read_bytes() for path in (source, tmp_path / "target")]
    assert len(data[0]) == len(data[1])
    start, changed = len(before.shards["model.safetensors"].header), set()
    for name, info in before.tensors.items():
        if data[0][start + info.start : start + info.end] != data[1][start + info.start : start + info.end]:
            changed.add(name)
    assert changed == {f"{layer}.{part}" for layer in (UP, DOWN) for part in ("weight", "weight_scale")}
    with safe_open(tmp_path / "target" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "b": "ünï", "a": "1"}


def test_convert_shards_keep_names_index_and_placement(make_checkpoint: Make, w8a8: Tensors, tmp_path: Path) -> None:
    shards = {
        A: [f"{UP}.weight", f"{DOWN}.weight_scale"],  # each scale in another shard than its weight
        B: [f"{DOWN}.weight", "lm_head.weight"],
        C: [f"{UP}.weight_scale", "model.norm.weight", "model.embed_tokens.weight"],
    }
    source = make_checkpoint(w8a8, shards=shards)
    (source / "model-00004-of-00003.safetensors").write_bytes(b"stray")
    done = convert(source, tmp_path / "target")
    assert done.skipped == ["model-00004-of-00003.safetensors"]
    assert sorted(path.name for path in (tmp_path / "target").glob("*.safetensors")) == [A, B, C]
    for shard, names in shards.items():
        assert set(load_file(tmp_path / "target" / shard)) == set(names)
    index = "model.safetensors.index.json"
    assert (tmp_path / "target" / index).read_bytes() == (source / index).read_bytes()


def test_convert_sharded_and_single_give_the_same_tensors(make_checkpoint: Make, w8a8: Tensors, tmp_path: Path) -> None:
    names = list(w8a8)
    convert(make_checkpoint(w8a8, "single"), tmp_path / "a")
    convert(make_checkpoint(w8a8, "sharded", shards={A: names[::2], B: names[1::2]}), tmp_path / "b")
    one, other = load(tmp_path / "a"), load(tmp_path / "b")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_convert_single_file_of_another_name_keeps_it(make_checkpoint: Make, tmp_path: Path) -> None:
    convert(make_checkpoint(name="pytorch_weights.safetensors"), tmp_path / "target")
    assert [path.name for path in (tmp_path / "target").glob("*.safetensors")] == ["pytorch_weights.safetensors"]


def test_convert_other_files_are_copied_and_left_out_ones_reported(
    make_checkpoint: Make, tmp_path: Path, tree: Tree
) -> None:
    source = make_checkpoint(where="cache/blobs ünï")
    snapshot = tmp_path / "cache" / "snapshot"
    snapshot.mkdir()
    for blob in source.iterdir():
        (snapshot / blob.name).symlink_to(os.path.relpath(blob, snapshot))
    (snapshot / "sub" / "deeper").mkdir(parents=True)
    (snapshot / "sub" / "deeper" / "a b.py").write_bytes(b"\0\xff")
    for name in (".gitattributes", "pytorch_model.bin", "consolidated.safetensors", MANIFEST_NAME):
        (snapshot / name).write_text("x")
    done = convert(snapshot, tmp_path / "target")
    assert done.skipped == [".gitattributes", "consolidated.safetensors", "pytorch_model.bin"]
    made = tree(tmp_path / "target")
    assert set(made) == {
        MANIFEST_NAME, "config.json", "model.safetensors", "tokenizer.json", "sub", "sub/deeper", "sub/deeper/a b.py",
    }  # fmt: skip
    assert not [name for name, what in made.items() if what.startswith("link")]
    for name in ("config.json", "tokenizer.json", "sub/deeper/a b.py"):
        assert (tmp_path / "target" / name).read_bytes() == (snapshot / name).read_bytes()


def test_convert_leaves_the_source_as_it_was(tiny_w8a8: Path, tmp_path: Path, tree: Tree) -> None:
    before = tree(tiny_w8a8)
    convert(tiny_w8a8, tmp_path / "target")
    assert tree(tiny_w8a8) == before


@pytest.mark.parametrize("head", ["absent", "same"])
def test_convert_tied_model_keeps_keys_flag_and_logits(make_llama: Make, tmp_path: Path, head: str) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from p2q.quantize import quantize

    original = make_llama(tmp_path / "bf16", tie_word_embeddings=True)
    if head == "same":
        tensors = load(original)
        save_file(
            {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
            original / "model.safetensors",
            {"format": "pt"},
        )
    quantize(original, tmp_path / "w8a8")
    convert(tmp_path / "w8a8", tmp_path / "p2q")
    assert json.loads((tmp_path / "p2q" / "config.json").read_text())["tie_word_embeddings"] is True
    keys = [set(open_checkpoint(tmp_path / name).tensors) for name in ("bf16", "w8a8", "p2q")]
    assert keys[1] == keys[2]
    assert ("lm_head.weight" in keys[2]) == (head == "same")
    prompt = torch.arange(9).reshape(1, 9)
    logits = [AutoModelForCausalLM.from_pretrained(tmp_path / name)(prompt).logits for name in ("bf16", "w8a8", "p2q")]
    assert all((other - logits[0]).norm() < 0.05 * logits[0].norm() for other in logits[1:])


# The manifest


def test_convert_manifest_holds_the_digest_of_every_file(tiny_w8a8: Path, tiny_p2q: Path) -> None:
    manifest = read_manifest(tiny_p2q)
    assert manifest is not None
    files = {str(path.relative_to(tiny_p2q)) for path in tiny_p2q.rglob("*") if path.is_file()}
    assert set(manifest.files) == files - {MANIFEST_NAME}
    assert manifest.files == {name: sha256_of(tiny_p2q / name) for name in manifest.files}
    assert changed_files(tiny_p2q, manifest) == {}
    assert manifest.source_digest == digest_of_files({name: sha256_of(tiny_w8a8 / name) for name in manifest.files})
    assert (manifest.rule, manifest.contract) == ("mse", 1)


def big(make_checkpoint: Make, w8a8: Tensors) -> Path:
    """With a layer large enough for torch to spread its work over threads."""
    random = torch.Generator().manual_seed(3)
    w8a8["big.weight"] = torch.randint(-127, 128, (700, 1600), generator=random, dtype=torch.int8)
    w8a8["big.weight_scale"] = torch.rand(700, 1, generator=random) + 0.01
    w8a8["tensor.weight"], w8a8["tensor.weight_scale"] = w8a8["big.weight"].flip(0).clone(), torch.tensor(0.0123)
    return make_checkpoint(w8a8)


@pytest.mark.parametrize("rule", RULES)
def test_convert_same_source_and_rule_give_the_same_bytes_anywhere(
    make_checkpoint: Make,
    w8a8: Tensors,
    tmp_path: Path,
    tree: Tree,
    threads: Threads,
    rule: Rule,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = big(make_checkpoint, w8a8)
    with threads(1):
        convert(source, tmp_path / "one", rule=rule)
    shutil.copytree(source, tmp_path / "elsewhere" / "copy")
    monkeypatch.chdir(tmp_path / "elsewhere")
    with threads(4):
        convert(Path("copy"), Path("../other parent/four"), rule=rule)
    assert tree(tmp_path / "one") == tree(tmp_path / "other parent" / "four")


def test_convert_overwrite_gives_the_same_bytes_again(
    tiny_w8a8: Path, tiny_p2q: Path, tmp_path: Path, tree: Tree
) -> None:
    target = tmp_path / "target"
    convert(tiny_w8a8, target, rule="nearest")
    (target / "stale.txt").write_text("stale")
    for _ in range(2):
        convert(tiny_w8a8, target, overwrite=True)
        assert tree(target) == tree(tiny_p2q)


# Converting twice


@pytest.mark.parametrize("rule", RULES)
def test_convert_twice_changes_no_byte(tiny_w8a8: Path, tmp_path: Path, tree: Tree, rule: Rule) -> None:
    convert(tiny_w8a8, tmp_path / "once", rule=rule)
    for second in RULES:
        done = convert(tmp_path / "once", tmp_path / "twice", rule=second, overwrite=True)
        assert not done.changed
        assert tree(tmp_path / "once") == tree(tmp_path / "twice")


def test_convert_power_of_two_source_is_refused_without_overwrite(tiny_p2q: Path, tmp_path: Path) -> None:
    with pytest.raises(ScaleError, match="every scale is already a power of two; there is nothing to convert"):
        convert(tiny_p2q, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_convert_power_of_two_source_without_manifest_gets_one(tiny_p2q: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_p2q, tmp_path / "source", ignore=shutil.ignore_patterns(MANIFEST_NAME))
    convert(tmp_path / "source", tmp_path / "target", overwrite=True)
    manifest = read_manifest(tmp_path / "target")
    assert manifest is not None
    assert {record.relative_error for record in manifest.tensors.values()} == {0.0}
    assert changed_files(tmp_path / "target", manifest) == {}


def test_convert_power_of_two_source_that_was_changed_gets_a_new_manifest(tiny_p2q: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_p2q, tmp_path / "source")
    (tmp_path / "source" / "chat_template.jinja").write_text("another")
    convert(tmp_path / "source", tmp_path / "target", overwrite=True)
    manifest = read_manifest(tmp_path / "target")
    assert manifest is not None
    assert changed_files(tmp_path / "target", manifest) == {}


def test_convert_power_of_two_source_with_a_broken_manifest_is_refused(tiny_p2q: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_p2q, tmp_path / "source")
    (tmp_path / "source" / MANIFEST_NAME).write_text("{}")
    with pytest.raises(CheckpointError, match="not a p2q manifest"):
        convert(tmp_path / "source", tmp_path / "target", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("scale", [2.0**-140, 2.0**100], ids=str)
def test_convert_power_of_two_out_of_range_over_zeros_is_still_to_be_converted(
    make_checkpoint: Make, w8a8: Tensors, tmp_path: Path, scale: float
) -> None:
    for layer in (UP, DOWN):
        w8a8[f"{layer}.weight_scale"].fill_(0.25)
    w8a8[f"{UP}.weight"][2] = 0
    w8a8[f"{UP}.weight_scale"][2] = scale
    assert convert(make_checkpoint(w8a8), tmp_path / "target").changed
    assert load(tmp_path / "target")[f"{UP}.weight_scale"].flatten().tolist() == [0.25, 0.25, 1.0, 0.25, 0.25, 0.25]


# Dry run


def test_convert_dry_run_writes_nothing_and_computes_the_same(tiny_w8a8: Path, tiny_p2q: Path, tmp_path: Path) -> None:
    done = convert(tiny_w8a8, tmp_path / "a" / "target", dry_run=True)
    real = read_manifest(tiny_p2q)
    assert real is not None
    assert done.manifest == real.model_copy(update={"files": {}})
    assert list(tmp_path.iterdir()) == []


def test_convert_dry_run_refuses_what_the_run_would_refuse(tiny_w8a8: Path, tiny_p2q: Path, tmp_path: Path) -> None:
    with pytest.raises(P2QError, match="the target exists"):
        convert(tiny_w8a8, tiny_p2q, dry_run=True)
    with pytest.raises(ScaleError, match="already a power of two"):
        convert(tiny_p2q, tmp_path / "target", dry_run=True)


def test_convert_target_that_holds_what_is_read_is_refused(
    make_checkpoint: Make, w8a8: Tensors, tmp_path: Path, tree: Tree
) -> None:
    source = make_checkpoint(w8a8)
    original = {name: tensor for name, tensor in w8a8.items() if not name.endswith("_scale")}
    original |= {name: tensor.to(torch.float32) for name, tensor in original.items() if tensor.dtype == torch.int8}
    originals = make_checkpoint(original, "target/originals", quantization=False)
    save_file(w8a8, tmp_path / "target" / "model.safetensors")
    (tmp_path / "target" / "config.json").write_text("{}")
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "config.json").write_bytes((source / "config.json").read_bytes())
    (linked / "model.safetensors").symlink_to(tmp_path / "target" / "model.safetensors")
    inside = tmp_path / ".target.p2q-work"
    shutil.copytree(source, inside)
    before = tree(tmp_path)
    for where, options in (
        (source, {"from_weights": originals}),
        (source, {"feedback": tmp_path / "target" / "statistics"}),
        (linked, {}),
        (inside, {}),
        (inside, {"dry_run": True}),
    ):
        with pytest.raises(TargetError, match="the target would replace what it is made from"):
            convert(where, tmp_path / "target", overwrite=True, **options)  # type: ignore[arg-type]
        assert tree(tmp_path) == before


def test_convert_to_the_root_is_refused(make_checkpoint: Make) -> None:
    with pytest.raises(TargetError, match="the target has no name"):
        convert(make_checkpoint(), Path("/"))


def test_convert_source_file_that_vanishes_is_named(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read"):
        convert(source, tmp_path / "target", progress=lambda *_: (source / "tokenizer.json").unlink(missing_ok=True))


def test_convert_originals_that_change_between_runs_redo_the_shard_of_scales(
    make_checkpoint: Make, w8a8: Tensors, tmp_path: Path, tree: Tree
) -> None:
    scales = [name for name in w8a8 if name.endswith("_scale")]
    shards = {"a.safetensors": scales, "b.safetensors": [name for name in w8a8 if name not in scales]}
    source = make_checkpoint(w8a8, shards=shards)
    first = {f"{name}.weight": w8a8[f"{name}.weight"] * w8a8[f"{name}.weight_scale"] for name in (UP, DOWN)}
    second = {name: tensor * 1.01 for name, tensor in first.items()}
    originals = make_checkpoint(first, "originals", quantization=False)
    convert(source, tmp_path / "target", from_weights=originals, part=Part(1, 2))
    save_file(second, originals / "model.safetensors", {"format": "pt"})
    convert(source, tmp_path / "fresh", from_weights=originals)
    assert convert(source, tmp_path / "target", from_weights=originals).kept == 0
    assert tree(tmp_path / "target") == tree(tmp_path / "fresh")
