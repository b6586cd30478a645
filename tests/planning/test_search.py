"""Tests of `plan --best`: it finds the fastest layouts that fit, prints them, and writes the first one as a config."""

from __future__ import annotations

from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.gpu import ROOT
from cli.main import main
from pipeline.base.errors import UserError
from pipeline.config.read import ConfigError, load_config, parse_config
from pipeline.parallel import traffic
from pipeline.parallel.mesh import resolve_layout
from planning.machine import load_machine
from planning.memory import estimate_memory, reserved_gpu_bytes
from planning.predict import predict_step
from planning.search import (
    CONFIGURED_LAYOUT_MARK,
    FRAGMENTATION_FACTOR,
    enumerate_layouts,
    find_fastest_fitting,
    parse_node_counts,
    predict_configured_layout,
    search_layouts,
    write_choice,
)
from planning.timeline import rank_actions
from planning.workload import workload_from_config

H100 = load_machine("h100")
VOCAB = 32000
CONFIG_VALUES: dict[str, Any] = {
    "run": {"name": "small"},
    "data": {"sequence_length": 2048, "tokenizer": {"vocab_size": VOCAB}},
    "model": {"dim": 2048, "layers": 8, "heads": 16, "kv_heads": 4, "intermediate_size": 5632},
    "train": {"steps": 2, "global_batch": 32, "micro_batch": 1, "precision": "bf16"},
    "stages": {"train": {"nodes": 2, "tasks_per_node": 4}},
}


def enumerate_by_brute_force() -> list[tuple[float, float]]:
    """Return, for every layout that the config `CONFIG_VALUES` allows on 8 ranks, tokens/s per GPU and needed bytes."""
    layouts = []
    sizes = (1, 2, 4, 8)
    schedules = (("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("zbv", 2))
    checkpointing = ("none", "selective", "full")
    combinations = product(sizes, sizes, schedules, range(4), sizes, (1, 2, 4, 8, 16), checkpointing)
    for tensor, pipeline, (schedule, virtual), zero, shard, micro_batch, kind in combinations:
        data = 8 // (tensor * pipeline)
        # ZeRO 0 shards nothing, and the other levels need at least two ranks that shard. Pipelines use only ZeRO 1.
        if tensor * pipeline > 8 or shard > data or (zero == 0) != (shard == 1) or (pipeline > 1 and zero > 1):
            continue
        # A replica is sharded by all data-parallel ranks, or by the data-parallel ranks of one node with 4 GPUs.
        if (pipeline == 1 and schedule != "1f1b") or 32 % micro_batch or shard not in (1, data, 4 // tensor):
            continue
        parallel = {
            "tensor": tensor, "pipeline": pipeline, "schedule": schedule, "virtual_stages": virtual, "zero": zero,
            "data": {"replicate": data // shard, "shard": shard}, "activation_checkpointing": kind,
        }  # fmt: skip
        try:
            train = {**CONFIG_VALUES["train"], "micro_batch": micro_batch}
            config = parse_config(CONFIG_VALUES | {"parallel": parallel, "train": train}, "c.yaml")
        except ConfigError:
            continue
        layout = resolve_layout(config, vocab_size=VOCAB)
        actions = rank_actions(layout)
        size = max(estimate_memory(config, layout, rank, VOCAB, actions[rank]).total for rank in range(pipeline))
        prediction = predict_step(workload_from_config(config, layout, VOCAB), H100.with_gpus_per_node(4))
        layouts.append((prediction.tokens_per_gpu, FRAGMENTATION_FACTOR * size + reserved_gpu_bytes(layout)))
    return layouts


def test_the_search_finds_the_same_layouts_as_brute_force() -> None:
    config = parse_config(CONFIG_VALUES, "c.yaml")
    choices = list(enumerate_layouts(config, H100, VOCAB, 2))
    all_layouts = enumerate_by_brute_force()
    assert len(choices) == len(all_layouts) > 200
    first_quartile = sorted(size for _, size in all_layouts)[len(all_layouts) // 4]
    too_large_by_limit = {}
    for limit in (first_quartile, 80e9):
        fitting, too_large = find_fastest_fitting(choices, limit)
        expected = sorted((tokens for tokens, size in all_layouts if size <= limit), reverse=True)[:10]
        assert [choice.prediction.tokens_per_gpu for choice in fitting] == pytest.approx(expected)
        assert all(choice.bytes_needed > limit for choice in too_large)
        too_large_by_limit[limit] = too_large
    assert not too_large_by_limit[80e9], "no layout that is faster than the fitting layouts may need more than 80 GB"


def test_the_search_matches_freeze_patterns_once_per_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has eight blocks of nine parameters, the embedding, the last norm and the output layer."""
    matched_names: list[str] = []

    def record_and_match(name: str, pattern: str) -> bool:
        matched_names.append(name)
        return fnmatch(name, pattern)

    monkeypatch.setattr(traffic, "fnmatch", record_and_match)
    freeze = {"optimizer": {"freeze": ["model.embed_tokens.*"]}}
    choices = list(enumerate_layouts(parse_config(CONFIG_VALUES | freeze, "c.yaml"), H100, VOCAB, 2))
    find_fastest_fitting(choices, 80e9)
    assert len(choices) > 100
    assert len(matched_names) == len(set(matched_names)) == 8 * 9 + 3


def test_write_choice_writes_the_best_layout_beside_the_config(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(
        "# a comment\n"
        + yaml.safe_dump(CONFIG_VALUES | {"parallel": {"data": {"replicate": 2, "shard": 4}, "zero": 1}})
    )
    original_text = path.read_text()
    overrides = ["train.global_batch=64", "model.layers=4"]
    _, best_choice = search_layouts(load_config(path, overrides), H100, VOCAB, [1, 2, 4])
    written_config = load_config(write_choice(best_choice, path, overrides))
    assert resolve_layout(written_config) == best_choice.layout
    assert written_config.stages.train.max_nodes * 4 == best_choice.layout.world_size
    assert (written_config.train.global_batch, written_config.model.layers) == (64, 4)
    assert written_config.train.micro_batch == best_choice.config.train.micro_batch
    assert path.read_text() == original_text
    with pytest.raises(UserError) as error:
        write_choice(best_choice, path, overrides)
    assert error.value.code == "plan.file_exists" and "my-best.yaml" in str(error.value)


def test_the_layout_of_the_config_has_exactly_one_row() -> None:
    """If the layout of the config is not among the best layouts, an additional row shows it.

    A layout is not among the best if it is slow, does not fit, or has a number of nodes that is not searched.
    """

    def find_rows_of_config(nodes: list[int], **sections: Any) -> list[str]:
        """Search layouts and return the rows that are marked as the layout of the config."""
        config = parse_config(CONFIG_VALUES | sections, "c.yaml")
        lines, _ = search_layouts(config, H100, VOCAB, nodes, predict_configured_layout(config, H100, VOCAB))
        return [line for line in lines if line.endswith(CONFIGURED_LAYOUT_MARK)]

    slow_layout = {"tensor": 4, "pipeline": 2, "schedule": "gpipe"}
    for nodes in ([2], [1, 4]):
        (row,) = find_rows_of_config(nodes, parallel=slow_layout)
        assert row.split()[0] == "2" and "pipeline 2 × data 1 × tensor 4 gpipe" in row and "too much" not in row
    (row,) = find_rows_of_config([2], site={"gpu_memory_gib": 8})
    assert "pipeline 1 × data 8 × tensor 1, micro-batch 1" in row and "GB too large" in row
    _, best_choice = search_layouts(parse_config(CONFIG_VALUES, "c.yaml"), H100, VOCAB, [2])
    best_config = best_choice.config
    lines, _ = search_layouts(best_config, H100, VOCAB, [2], predict_configured_layout(best_config, H100, VOCAB))
    # the first row, after the header, is marked
    assert [number for number, line in enumerate(lines) if line.endswith(CONFIGURED_LAYOUT_MARK)] == [1]


def test_the_search_fails_if_no_layout_fits_into_the_memory() -> None:
    config = parse_config(CONFIG_VALUES | {"site": {"gpu_memory_gib": 0.5}}, "c.yaml")
    with pytest.raises(UserError) as error:
        search_layouts(config, H100, VOCAB, [2])
    assert error.value.code == "plan.no_layout_fits"
    assert "--nodes" in str(error.value)


@pytest.mark.parametrize(
    ("text", "expected_counts"),
    [("4", [4]), ("2..64", [2, 4, 8, 16, 32, 64]), ("3..7", [3, 6, 7]), ("3..10, 1", [3, 6, 10, 1])],
)
def test_node_counts_are_parsed(text: str, expected_counts: list[int]) -> None:
    """A range `2..64` is doubled from its start to its end."""
    assert parse_node_counts(text) == expected_counts


@pytest.mark.parametrize("text", ["", "0", "a", "4..2", "1.5", "1..", "..4", "9999999999", "-3", "2...4"])
def test_invalid_node_counts_are_an_error(text: str) -> None:
    with pytest.raises(UserError) as error:
        parse_node_counts(text)
    assert error.value.code == "plan.invalid_nodes"


def test_plan_best_prints_and_writes_layouts_or_fails_with_a_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump(CONFIG_VALUES | {"site": {"machine": "h100"}}))
    monkeypatch.setattr("cli.plan.prepare_for_torch", lambda: None)  # it would change the signals of this process

    def run_plan(*arguments: str) -> tuple[int, str, str]:
        """Return the exit code, the standard output and the standard error of `plan`."""
        monkeypatch.setattr("sys.argv", ["submit.py", "plan", str(path), *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        return (int(stopped.value.code or 0), *capfd.readouterr())

    code, out, _ = run_plan("train.global_batch=64")
    assert code == 0 and "predicted for H100 SXM5 80 GB: " in out
    code, out, _ = run_plan("--best", "--nodes=1", "--write", "--machine", "a100-80")
    assert code == 0 and "layouts on A100 SXM4 80 GB" in out and f"written: {tmp_path}/my-best.yaml" in out
    # The layout of the config may be invalid. All other keys of the config must be valid.
    code, out, _ = run_plan("--best", "--nodes=1,2", "parallel.tensor=3", "parallel.zero=3", "train.micro_batch=7")
    assert code == 0 and "layouts on H100 SXM5 80 GB" in out and "none of" not in out
    assert "the config's own layout is invalid: " in out and "micro_batch (7)" in out
    code, out, _ = run_plan("--best", "train.global_batch=2")  # at most two replicas
    assert code == 0 and "× data 2 × tensor" in out and "× data 8" not in out
    code, _, err = run_plan("--best", "train.global_batch=2", "parallel.reduce=micro_batch", "train.precision=fp32")
    assert code == 2 and "parallel.reduce micro_batch" in err and "parallel.zero 2 or 3" in err
    code, _, err = run_plan("--best", "train.global_batch=0")
    assert code == 2 and "train.global_batch" in err
    code, _, err = run_plan("parallel.tensor=3")
    assert code == 2 and "does not divide the number of training ranks" in err
    monkeypatch.chdir(ROOT)
    path = ROOT / "configs/lm-8b.yaml"
    code, _, err = run_plan("--best")
    assert code == 2 and "error[plan.no_machine]" in err
    # --machine overrides the GPU memory of the site
    code, out, err = run_plan("--machine", "a100-40")
    assert code == 2 and "a GPU has 42.9 (40 GiB, by --machine" in err and "predicted" not in out
    for arguments in (("--nodes", "2"), ("--write",), ("--best", "--goodput"), ("--rehearse", "0", "--best")):
        code, _, err = run_plan(*arguments)
        assert code == 2 and "error[plan.conflict]" in err, arguments


def test_the_written_config_includes_the_overrides_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub/my.yaml"
    path.write_text(yaml.safe_dump(CONFIG_VALUES | {"run": {"name": "in-file", "root": str(tmp_path / "runs")}}))
    monkeypatch.chdir(tmp_path)
    overrides = ["stages.train.time=01:00:00", "run.name=override", "data.source=corpus/*.txt", "train.global_batch=64"]
    config = load_config(path, overrides)
    _, best_choice = search_layouts(config, H100, VOCAB, [2])
    written_config = load_config(write_choice(best_choice, path, overrides))
    assert written_config.run.name == "override" and written_config.run.root == tmp_path / "runs"
    assert written_config.stages.train.time == "01:00:00"
    assert written_config.data.source == str(tmp_path / "corpus/*.txt")
    assert written_config.train.global_batch == 64 and written_config.stages.train.nodes == 2
    assert written_config.train.micro_batch == best_choice.config.train.micro_batch


def test_needed_gpu_memory_with_offload_has_only_gathered_weights_and_activations() -> None:
    config = parse_config(CONFIG_VALUES | {"parallel": {"zero": 3, "offload": True}}, "c.yaml")
    (choice, *_), _ = find_fastest_fitting(list(enumerate_layouts(config, H100, VOCAB, 1)), 1e15)
    memory = estimate_memory(choice.config, choice.layout, 0, VOCAB, rank_actions(choice.layout)[0])
    expected = FRAGMENTATION_FACTOR * (memory.gathered + memory.activations) + reserved_gpu_bytes(choice.layout)
    assert choice.bytes_needed == pytest.approx(expected)
