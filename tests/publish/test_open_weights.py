"""Training from an open model's folder: on any layout what transformers itself computes; a damaged one is refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_prep.tokenizer import train_bpe
from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import CheckpointError, ExitCode, UserError
from pipeline.base.files import read_json, write_json
from pipeline.checkpoint.identity import SOURCE_FILE
from pipeline.config.read import load_config
from pipeline.config.sections import Config
from pipeline.publish.card import write_card
from pipeline.publish.generate import _load_run
from pipeline.run.directory import Run
from pipeline.run.stages import load_stage_module
from tests.support.ranks import make_rank_info, run_ranks
from tests.support.tiny import CONFIG, WORDS, HarmlessFlag, compute_run_digest, stage_rank, write_corpus
from tests.support.tiny_training import BATCHES, STEPS, VOCAB, continue_training, make_batches, tiny_config

SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 8}, "attention_bias": True},
    "mistral": {"head_dim": 8, "sliding_window": 16, "tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
}
ROUNDING = 4e-5
"""Of a parameter's gradient. In float32 those of queries and keys, sums that nearly cancel, are up to 2e-5 off, ours
and transformers' own, beside the same in float64; of all other parameters 2e-6."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "tensor, no sequence": {"tensor": 2, "sequence": False},
    "pipeline": {"pipeline": 2, "zero": 1},
    "zero 3": {"zero": 3},
}


def save(folder: Path, family: str, pieces: str = "50GB", **more: Any) -> Any:
    """A model of transformers with random weights, none of them like another, saved in `folder`; the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    theirs = AutoConfig.for_model(family, **{**SIZES, **more})
    model = AutoModelForCausalLM.from_config(theirs, attn_implementation="eager")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2, generator=generator)
    model.save_pretrained(folder, max_shard_size=pieces)
    vocabulary = {str(number): number for number in range(theirs.vocab_size)}
    write_json(folder / "tokenizer.json", {"model": {"vocab": vocabulary}})
    write_json(folder / "tokenizer_config.json", {"eos_token": "0"})
    return model


def config_from(folder: Path, ranks: int, **parallel: Any) -> Config:
    return tiny_config(ranks, data={"tokenizer": None}, model={"init_from": str(folder)}, parallel=parallel)


Arrays = dict[str, Any]
"""numpy's: a tensor would go from rank to test by a file that ends with the rank."""


def first_step(engine: Any, where: RankInfo) -> tuple[Any, Arrays]:
    """What this rank sees of the first step before it is done: logits of its samples, and whole gradients by names."""
    from pipeline.model.decoder import full_tensor

    task, seen = engine.task, []
    loss, part = task.loss, engine.layout.coordinates(where.rank).dp

    def watched(outputs: Any, batch: Any) -> Any:
        seen.append(full_tensor(outputs.detach()).clone())  # its memory is taken for other things
        return loss(outputs, batch)

    task.loss = watched
    batch = make_batches(engine.config)
    engine.backward({"tokens": batch[0].chunk(engine.layout.dp)[part]}, 1)
    task.loss = loss
    named = [each for piece in engine.parts for each in task.named_weights(piece)]
    gradients = {name: full_tensor(parameter.grad).numpy().copy() for name, parameter in named}
    engine.optimizer.zero_grad(set_to_none=True)
    engine.replica_sync.end_step(is_applied=False)
    rows = len(batch[0]) // engine.layout.dp  # a pipeline tries one micro-batch out before
    return torch.cat(seen)[-rows:].numpy() if seen else None, gradients


def close(found: Any, expected: torch.Tensor, error: float = 1e-5) -> bool:
    """To so much of the largest number."""
    return bool((torch.as_tensor(found) - expected).abs().max() <= error * expected.abs().max())


def start_rank(where: RankInfo, path: Path, configs: list[Config]) -> list[tuple[list[tuple[float, float]], int, Any]]:
    """Losses and gradient norms of each config in turn, how many numbers this rank read of its folder, and what
    `first_step` says."""
    from pipeline.comm import groups
    from pipeline.model import open_weights as module
    from pipeline.model.task import DecoderTask
    from pipeline.parallel.mesh import resolve_layout
    from pipeline.train.engine import Engine

    groups.configure_determinism(configs[0])
    world = groups.join_process_group(where, configs[0])
    opened, results = module.safe_open, []
    for config in configs:
        layout, task, read = resolve_layout(config, world.size, where.local_world_size), DecoderTask(config, VOCAB), [0]
        source = module.open_initial_weights(Run(path, config), task, groups.new_control_group())

        class Counting:
            def __init__(self, *given: Any, **more: Any) -> None:
                self.file = opened(*given, **more)

            def __enter__(self) -> Counting:
                self.file.__enter__()
                return self

            def __exit__(self, *error: Any) -> None:
                self.file.__exit__(*error)

            def get_slice(self, name: str) -> Any:
                self.name = name
                return self

            def __getitem__(self, at: Any) -> torch.Tensor:
                part = self.file.get_slice(self.name)[at]
                read[0] += part.numel()  # noqa: B023
                return part

        module.safe_open = Counting  # type: ignore[misc, assignment]
        engine = Engine(config, layout, world, task, source=source)
        module.safe_open = opened  # type: ignore[misc]
        first = first_step(engine, where)
        results.append((continue_training(engine, where, 0, STEPS), read[0], first))
    return results


def theirs_alone(model: Any, config: Config) -> tuple[list[tuple[float, float]], tuple[torch.Tensor, Arrays]]:
    """Losses and gradient norms of a plain loop over transformers' own model with torch's AdamW; logits and gradients
    of its first step."""
    options, results, first = config.optimizer, [], None
    by_decay = [[p for p in model.parameters() if (p.ndim > 1) == matrix] for matrix in (True, False)]
    groups = [{"params": by_decay[0], "weight_decay": options.weight_decay}, {"params": by_decay[1], "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps)
    for batch in make_batches(config)[:STEPS]:
        optimizer.zero_grad()
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        first = first or (logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()})
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm or 0.0)
        optimizer.step()
        results.append((loss.item(), norm.item()))
    assert first is not None
    return results, first


@pytest.mark.parametrize(
    ("family", "layouts"),
    [("qwen3", ["tensor"]), *(pytest.param(name, list(LAYOUTS), marks=pytest.mark.story) for name in FAMILIES)],
)
def test_ten_steps_are_those_of_transformers_on_every_layout(tmp_path: Path, family: str, layouts: list[str]) -> None:
    assert BATCHES >= STEPS == 10
    folder = tmp_path / family
    model = save(folder, family, "20KB", **FAMILIES[family])
    assert len(list(folder.glob("*.safetensors"))) > 1
    alone = config_from(folder, 1)
    expected, (logits, gradients) = theirs_alone(model, alone)
    [[(losses, read, (seen, found))]] = run_ranks(1, start_rank, tmp_path, [alone])
    assert losses == [pytest.approx(step, rel=1e-5) for step in expected]
    assert close(seen, logits) and found.keys() == gradients.keys()
    assert all(close(found[name], gradients[name], ROUNDING) for name in gradients)
    whole = sum(p.numel() for p in model.parameters())
    vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert read == whole
    ranks = run_ranks(2, start_rank, tmp_path, [config_from(folder, 2, **LAYOUTS[layout]) for layout in layouts])
    for number, layout in enumerate(layouts):
        for rank in ranks:
            assert rank[number][0] == [pytest.approx(step, rel=1e-5) for step in losses], layout
        parts = [rank[number][2] for rank in ranks]
        seen = [part for part, _ in parts if part is not None]  # of a pipeline only its last stage has logits
        assert close(seen[0] if len(seen[0]) == len(logits) else np.concatenate(seen), logits), layout
        assert {name for _, found in parts for name in found} == gradients.keys(), layout
        for name, gradient in ((name, gradient) for _, found in parts for name, gradient in found.items()):
            assert close(gradient, gradients[name], ROUNDING), (layout, name)
        reads = [rank[number][1] for rank in ranks]
        twice = vectors if "tensor" in layout else 0  # norms are alike on tensor parallel ranks
        if layout == "pipeline" and model.config.tie_word_embeddings:
            twice = VOCAB * 16
        assert whole <= sum(reads) <= whole + twice and max(reads) < 0.7 * whole, (layout, reads)


def refused_rank(where: RankInfo, path: Path, configs: list[Config]) -> list[str]:
    """What opening the folder of each config says."""
    from pipeline.comm import groups
    from pipeline.model.open_weights import open_initial_weights
    from pipeline.model.task import DecoderTask

    groups.join_process_group(where, configs[0])
    told = []
    for config in configs:
        try:
            open_initial_weights(Run(path, config), DecoderTask(config, VOCAB), groups.new_control_group())
        except UserError as error:
            told.append(f"{error.code}: {error}")
        else:
            told.append("nothing")
    return told


class Bomb:
    """What unpickles as a call of `touch`."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_damaged_and_hostile_folders_are_refused_by_all_ranks(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save(tmp_path / "right", "qwen2")
    weights = load_file(tmp_path / "right/model.safetensors")
    norm, up = "model.norm.weight", "model.layers.3.mlp.up_proj.weight"

    def folder(name: str, tensors: dict[str, Any] | None = None) -> Path:
        copy = shutil.copytree(tmp_path / "right", tmp_path / name)
        if tensors is not None:
            save_file(tensors, copy / "model.safetensors", {"format": "pt"})
        return Path(copy)

    lacking = {name: value for name, value in weights.items() if name != up}
    cases = {
        folder("lacks", lacking): ("model.missing_tensor", up),
        folder("shape", {**weights, norm: torch.ones(17)}): ("model.wrong_shape", norm, "[17]", "config.json", "[16]"),
        folder("type", {**weights, norm: torch.ones(16, dtype=torch.int8)}): ("model.wrong_type", norm, "I8", "BF16"),
        folder("more", {**weights, "model.extra.bias": torch.ones(3)}): (
            "model.unexpected_tensor",
            "config.json",
            "model.extra.bias",
        ),
        (inverse := folder("old", {**weights, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})): (
            "nothing",
        ),
        (torn := folder("torn")): ("model.not_safetensors",),
        (longer := folder("longer")): ("model.not_safetensors",),
        (shorter := folder("shorter")): ("model.not_safetensors",),
        (endless := folder("endless")): ("model.not_safetensors",),
        (link := folder("link")): ("model.link_outside_folder", "model.safetensors"),
        (bomb := folder("bomb")): ("model.not_safetensors",),
        (twice := folder("twice")): ("model.duplicate_tensor", norm, "a.safetensors", "model.safetensors"),
        (changed := folder("changed")): ("model.folder_changed", "config.json"),
        (other := folder("other")): ("model.folder_changed", "weight"),
    }
    assert inverse.exists()
    content = (torn / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(content[: len(content) // 2])
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    begin, end = header[up]["data_offsets"]
    for lie, values in (
        (longer, {"shape": [32, 17]}),  # than its numbers
        (shorter, {"data_offsets": [begin + 1_000_000, end + 1_000_000]}),  # the file than the place
    ):
        text = json.dumps({**header, up: {**header[up], **values}}).encode()
        (lie / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    (endless / "model.safetensors").write_bytes((2**60).to_bytes(8, "little") + content[8:])
    (link / "model.safetensors").unlink()
    (link / "model.safetensors").symlink_to(tmp_path / "right/model.safetensors")
    (bomb / "model.safetensors").write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
    save_file({norm: weights[norm]}, twice / "a.safetensors")
    index = {norm: "a.safetensors", up: "model.safetensors"}
    write_json(twice / "model.safetensors.index.json", {"weight_map": index})
    (link / "model.safetensors").rename(link / "away")  # a run is made before the link
    shutil.copy(tmp_path / "right/model.safetensors", link)
    configs = [config_from(path, 2) for path in cases]
    (link / "away").replace(link / "model.safetensors")
    theirs = json.loads((changed / "config.json").read_bytes())
    write_json(changed / "config.json", {**theirs, "rms_norm_eps": 0.5})
    save_file({name: value + 1 for name, value in weights.items()}, other / "model.safetensors", {"format": "pt"})
    os.utime(other / "model.safetensors", (1, 1))  # another second than that of the copy
    for told in run_ranks(2, refused_rank, tmp_path, configs):
        for path, error, facts in zip(cases, told, cases.values(), strict=True):
            assert error.startswith(facts[0]) and all(fact in error for fact in facts), (path.name, error)
    assert not (tmp_path / "executed").exists()


def make_run(folder: Path, name: str, source: Path, steps: int) -> Run:
    """A run that starts from `source`, its shards ready."""
    text = CONFIG.format(name=name, root=folder / "runs", source=write_corpus(folder), steps=steps)
    model, tokenizer = "model: {dim: 32, layers: 2, heads: 4, kv_heads: 2, dropout: 0.1}", "  tokenizer: "
    lines = [line for line in text.splitlines() if not line.startswith(tokenizer)]
    text = (
        "\n".join(lines)
        .replace(model, f"model: {{init_from: {source}}}")
        .replace("warmup_steps: 2", "schedule: constant")
    )
    assert text.count(str(source)) == 1 and "constant" in text
    (folder / f"{name}.yaml").write_text(text)
    run = Run.create(load_config(folder / f"{name}.yaml"))
    for stage in ("prepare", "shard"):
        load_stage_module(stage).run_stage(run, make_rank_info(0, 1, 1), {}, HarmlessFlag())
    return run


def test_a_run_goes_on_without_the_folder_that_it_came_from(tmp_path: Path) -> None:
    source = tmp_path / "models--some--open/snapshots/0123"  # as a cache of the Hub has it
    save(source, "qwen3", vocab_size=320, **FAMILIES["qwen3"])  # more rows than the tokenizer has ids
    (source / "tokenizer.json").write_text(train_bpe([" ".join(WORDS)], 300, "<|end|>"))
    write_json(source / "tokenizer_config.json", {"eos_token": "<|end|>"})
    write_json(source / "generation_config.json", {"eos_token_id": [0, 7]})
    calm, run = make_run(tmp_path, "calm", source, 8), make_run(tmp_path, "run", source, 4)
    assert run_ranks(2, stage_rank, calm.path, "train") == [ExitCode.DONE] * 2
    assert run_ranks(2, stage_rank, run.path, "train") == [ExitCode.DONE] * 2
    first = json.loads(run.metrics_file.read_text().splitlines()[0])
    assert 0.5 < first["loss"] < 20
    shutil.rmtree(source)
    run = Run.open(run.path)
    run.apply_overrides(["train.steps=8"])
    assert run_ranks(2, stage_rank, run.path, "train") == [ExitCode.DONE] * 2
    assert compute_run_digest(run) == compute_run_digest(calm)
    assert run_ranks(1, stage_rank, run.path, "evaluate") == [ExitCode.DONE]
    assert _load_run(run.path, "the model", None, 5)[2] == [0, 7], "its text ends where the open model's ends"
    # the weights that it began with are part of what it is
    note = read_json(calm.path / SOURCE_FILE)
    assert set(note["files"]) == {"config.json", "model.safetensors"}
    run.apply_overrides([f"publish={{to: {tmp_path}}}"])
    write_card(Run.open(run.path), tmp_path, 8, None, [])
    card = (tmp_path / "README.md").read_text()
    assert "base_model: some/open\n" in card
    for name, sha256 in note["files"].items():
        assert f"started from 0123/{name}: sha256 {sha256}" in card and len(sha256) == 64
    (run.path / SOURCE_FILE).write_text("{}")
    with pytest.raises(AssertionError, match=f"{CheckpointError.__name__}.*{SOURCE_FILE} is missing or damaged"):
        run_ranks(1, stage_rank, run.path, "train")


def memory_rank(where: RankInfo, path: Path, configs: list[Config]) -> dict[str, float]:
    """By how much more memory than before this rank ever took to import its share of the last config, and that share
    with AdamW's two moments of it, in GB; the configs before import modules, too."""
    from benchmarks.convert import measure_block
    from pipeline.comm import groups
    from pipeline.model.decoder import local_tensor
    from pipeline.model.open_weights import open_initial_weights
    from pipeline.model.task import DecoderTask
    from pipeline.parallel.mesh import resolve_layout
    from pipeline.train.engine import Engine

    results: dict[str, float] = {}
    world = groups.join_process_group(where, configs[0])
    for config in configs:
        task, layout = DecoderTask(config, VOCAB), resolve_layout(config, world.size, where.local_world_size)
        with measure_block(results, "import"):
            source = open_initial_weights(Run(path, config), task, groups.new_control_group())
            engine = Engine(config, layout, world, task, source=source)
            assert source is not None and engine.parts
            source.write_source()
    return {
        **results,
        "share": 3 * sum(local_tensor(p).nbytes for part in engine.parts for p in part.parameters()) / 1e9,
    }


@pytest.mark.story
@pytest.mark.parametrize("parallel", [{"zero": 3}, {"tensor": 2}, {"pipeline": 2}], ids=str)
def test_a_rank_that_imports_has_its_share_in_memory_and_one_tensor(tmp_path: Path, parallel: dict[str, Any]) -> None:
    """Of 0.5 GB in float32, two tensors 67 MB each: were all of it read by each rank, or twice, it would show."""
    sizes: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 6,
        "vocab_size": 16384,
    }
    model = save(tmp_path / "open", "llama", **sizes)
    whole = sum(parameter.nbytes for parameter in model.parameters()) / 1e9
    largest = max(parameter.nbytes for parameter in model.parameters()) / 1e9
    del model
    own = {"init_from": str(tmp_path / "open"), "dim": 1024, "layers": 6, "intermediate_size": 4096}
    config = tiny_config(2, data={"tokenizer": None}, model=own, parallel=parallel)
    save(tmp_path / "small", "llama")
    configs = [config_from(tmp_path / "small", 2, **parallel), config]
    for found in run_ranks(2, memory_rank, tmp_path, configs):
        assert found["share"] < 3 * 0.66 * whole
        assert found["import, memory"] < found["share"] + largest + 0.06, (found, whole, largest)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_three_billion_bytes_become_a_folder_in_two_and_a_tensor(tmp_path: Path) -> None:
    """And are imported by one process in their own size and a tensor."""
    from benchmarks import convert

    convert.make_source(tmp_path / "open", 16)
    run = convert.make_run(tmp_path, tmp_path / "open")
    size = sum(path.stat().st_size for path in (tmp_path / "open").glob("*.safetensors")) / 1e9
    largest = 2 * 128256 * 3072 / 1e9
    assert size > 3
    assert convert.run_child("import", run)["import, memory"] < size + largest + 0.1
    assert convert.run_child("export", run)["export, memory"] < 2 + largest
