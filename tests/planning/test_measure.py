"""What `plan --measure` fits, on timings that were invented by arithmetic, or recorded once on two quiet cores."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.base.console import PlainConsole
from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import UserError
from pipeline.base.yaml12 import parse_yaml
from pipeline.comm import groups
from pipeline.config.read import load_config, parse_config
from pipeline.config.track import TrackConfig
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run
from planning import predict
from planning.calibrate import (
    compare_steps,
    fit_line,
    fit_link,
    fit_machine,
    look,
    missing,
    progress,
    read_device_facts,
    write_machine,
)
from planning.machine import Exchange, Machine, Overheads, Step, Timings, load_machine
from planning.measuring import config_of
from planning.plan import describe_plan
from planning.predict import CommGroup, predict_step
from planning.workload import Workload, matrix_shapes
from tests.support.ranks import run_ranks

WORK = Workload(
    layers=4, hidden=256, heads=8, kv_heads=4, ffn=704, vocab=4096, sequence=256, micro_batch=4, global_batch=16,
    shard=2, precision="fp32", low_bytes=4, tied=True,
)  # fmt: skip
CUT = replace(WORK, tensor=2)
RATE, COPIED_S = 1.7e11, 0.0103
RECORDED = Timings(
    products=[(m, n, k, 2 * m * n * k / RATE) for m, n, k in matrix_shapes(WORK)], attention=2.6e-3,
    copied=(1 << 26, COPIED_S),
    exchanges=[
        Exchange(kind="all_gather", size=1 << 20, ranks=2, between=False, seconds=4e-4),
        Exchange(kind="all_reduce", size=1 << 24, ranks=2, between=False, seconds=1.2e-2),
    ],
    steps=[Step(work=WORK, ranks_per_node=2, seconds=0.59)],
)  # fmt: skip
TWO_STEPS = RECORDED.model_copy(update={"steps": [*RECORDED.steps, Step(work=CUT, ranks_per_node=4, seconds=1.13)]})


def exchanges(machine: Machine, between: bool) -> list[Exchange]:
    """What collectives.py says that they would take, of several numbers of ranks and sizes."""
    found = []
    for ranks in (2, 4, 8):
        group = CommGroup(ranks, 1 if between else ranks)
        for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24):
            for kind, seconds in (
                ("all_reduce", predict.all_reduce_time(size, group, machine)),
                ("all_gather", predict.all_gather_time(size, group, machine)),
                ("reduce_scatter", predict.all_gather_time(size, group, machine)),
                ("send", predict.send_time(size, group, machine)),
            ):
                values = {"kind": kind, "size": size, "ranks": ranks, "between": between, "seconds": seconds}
                found.append(Exchange.model_validate(values))
    return found


@pytest.mark.parametrize("name", ["h100", "a100-80", "mi300x"])
@pytest.mark.parametrize("between", [False, True])
def test_links_are_found_again_exactly(name: str, between: bool) -> None:
    """Timings that obey α and β give these."""
    machine = load_machine(name)
    link, found = machine.between if between else machine.inside, fit_link(exchanges(machine, between))
    assert found is not None
    assert found.latency == pytest.approx(link.latency) and found.bandwidth == pytest.approx(link.bandwidth)
    assert fit_link([]) is None


@given(st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-8))
@settings(max_examples=50)
def test_a_line_is_found_again(a: float, b: float) -> None:
    rows = [(1.0, float(y), a + b * y) for y in (1, 1 << 10, 1 << 20, 1 << 26)]
    assert fit_line(rows) == pytest.approx((a, b), rel=1e-6)


def test_timings_that_no_line_gives_stay_physical() -> None:
    """Caches make small messages cheaper than any latency: none is found, and the bandwidth is positive."""
    assert fit_line([(1.0, 1e3, 1e-9), (1.0, 1e6, 1e-3)])[0] >= 0
    flat = fit_line([(1.0, 1e3, 1e-3), (1.0, 1e6, 0.9e-3)])
    assert flat[0] > 0 and flat[1] == 0.0
    slower = fit_link([Exchange(kind="send", size=4096, ranks=2, between=False, seconds=1.0)])
    assert slower is not None and slower.bandwidth > 0


def test_what_was_measured_is_predicted() -> None:
    """One layout, then two of which the second has twice as many ranks as cores: their own steps come out."""
    one = fit_machine(RECORDED, "CPU", 8, 1, 2)
    assert predict_step(WORK, one).step == pytest.approx(0.59, rel=1e-3)
    assert one.achievable["fp32"] == pytest.approx(RATE, rel=0.1)  # with half a wave of tiles idle
    assert one.bandwidth == pytest.approx(2 * (1 << 26) / COPIED_S)
    assert one.measured is not None and one.measured.call == 0.0
    crowded = fit_machine(RECORDED, "CPU", 8, 1, 1)  # what two ranks on one core took, one takes half of
    assert predict_step(WORK, crowded).step == pytest.approx(0.59, rel=1e-3)
    for figure in (lambda m: m.achievable["fp32"], lambda m: m.bandwidth, lambda m: m.inside.bandwidth,
                   lambda m: m.attention.portable, lambda m: 1 / m.inside.latency):  # fmt: skip
        assert figure(crowded) == pytest.approx(2 * figure(one))
    two = fit_machine(TWO_STEPS, "CPU", 8, 1, 2)
    for step in TWO_STEPS.steps:
        assert predict_step(step.work, two.in_nodes_of(step.ranks_per_node)).step == pytest.approx(
            step.seconds, rel=5e-3
        )
    assert two.measured is not None and 1e-3 < two.measured.call < 1e-2


def test_overheads_that_made_the_steps_are_found_again() -> None:
    """Steps that were predicted with some overheads give these, also where the timings were of a crowd."""
    for cores in (1, 2):
        machine = fit_machine(TWO_STEPS, "CPU", 8, 1, cores)
        given = Overheads(eager=2.5, call=2e-3)
        machine = machine.model_copy(update={"measured": given})
        steps = [
            Step(work=w, ranks_per_node=n, seconds=predict_step(w, machine.in_nodes_of(n)).step)
            for w, n in ((WORK, 2), (CUT, 4))
        ]
        again = fit_machine(TWO_STEPS.model_copy(update={"steps": steps}), "CPU", 8, 1, cores).measured
        assert again is not None
        assert (again.eager, again.call) == pytest.approx((2.5, 2e-3), rel=0.01)


def test_ranks_that_share_a_core_take_its_time_in_turn() -> None:
    """Twice the ranks on the same cores: the same work in all takes as long, and waiting costs nothing there."""
    machine = fit_machine(RECORDED, "CPU", 8, 1, 2)
    half = predict_step(replace(WORK, shard=4), machine.in_nodes_of(4))
    assert half.step == pytest.approx(predict_step(WORK, machine).step, rel=0.15)
    assert (
        predict_step(replace(WORK, shard=4), machine.model_copy(update={"cores": 4}).in_nodes_of(4)).step
        < 0.6 * half.step
    )
    piped = replace(WORK, shard=1, pipeline=4, global_batch=4)  # one micro-batch: three of four ranks wait
    assert (
        predict_step(piped, machine.in_nodes_of(4)).step < 1.2 * predict_step(replace(piped, pipeline=1), machine).step
    )


def test_zero_costs_a_cpu_what_fsdp_does_there() -> None:
    """Beside plain data parallel, as real steps of two ranks took CPU time: copies, and each group's own call."""
    machine, work = fit_machine(TWO_STEPS, "CPU", 8, 1, 2), replace(WORK, tied=False)
    plain = predict_step(replace(work, replicate=2, shard=1), machine).step
    found = [predict_step(replace(work, zero=zero), machine).step / plain for zero in (1, 2, 3)]
    assert found == pytest.approx([1.08, 1.13, 1.28], abs=0.03)


def test_the_file_says_it_all_again(tmp_path: Path) -> None:
    """Written and read, it is the same machine to five digits; it is never replaced, and nothing else is left."""
    machine, file = fit_machine(TWO_STEPS, "CPU", 8, 1, 2), tmp_path / "own.yaml"
    write_machine(machine, file, ["told\nand not: a key"])
    text = file.read_text()
    assert text.startswith("# ") and "\nand not" not in text
    again = load_machine(str(file))
    assert again.timings is not None and again.timings.steps[1].work == CUT
    assert predict_step(WORK, again).step == pytest.approx(predict_step(WORK, machine).step, rel=1e-3)
    with pytest.raises(UserError, match=r"own\.yaml exists, and is not replaced: move it away"):
        write_machine(machine, file, [])
    assert file.read_text() == text and list(tmp_path.iterdir()) == [file]


def test_a_poor_fit_is_told_in_the_file_and_at_the_end(tmp_path: Path) -> None:
    """One layout that took twice as long the second time: no figures fit both, and both are named."""
    again = Step(work=WORK, ranks_per_node=2, seconds=1.2)
    busy = fit_machine(RECORDED.model_copy(update={"steps": [*RECORDED.steps, again]}), "CPU", 8, 1, 2)
    told, run = list(compare_steps(busy)), measuring(tmp_path)
    words = (
        r"POOR FIT: pipeline 1 × data 2 × tensor 1, micro-batch 4: predicted 0\.84\d s, timed {} s: measure again on a"
    )
    assert len(told) == 2 and all(re.match(words.format(s), t) for s, t in zip((0.59, 1.2), told, strict=True)), told
    write_machine(busy, tmp_path / "own.yaml", told)
    assert progress(run).words == "; ".join([str(tmp_path / "own.yaml"), *told])
    assert load_machine(str(tmp_path / "own.yaml")).timings is not None


def test_a_good_fit_has_no_warning(tmp_path: Path) -> None:
    machine = fit_machine(TWO_STEPS, "CPU", 8, 1, 2)
    told = list(compare_steps(machine))
    assert told[1].startswith("pipeline 1 × data 2 × tensor 2, micro-batch 4: predicted 1.13 s, timed 1.13 s"), told
    write_machine(machine, tmp_path / "own.yaml", told)
    assert f"# {told[0]}\n# {told[1]}\n" in (tmp_path / "own.yaml").read_text()
    assert progress(measuring(tmp_path)).words == str(tmp_path / "own.yaml")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [("heads: 8", "heads: 0", "work.heads is 0"), ("eager:", "eagerly:", "measured.eager"),
     ("call: ", "call: -", "call"), ("kind: all_gather", "kind: gossip", "kind"), ("cores: 2", "cores: 0", "cores")],
)  # fmt: skip
def test_damaged_files_are_refused_in_words(tmp_path: Path, old: str, new: str, words: str) -> None:
    write_machine(fit_machine(TWO_STEPS, "CPU", 8, 1, 2), tmp_path / "own.yaml", [])
    text = (tmp_path / "own.yaml").read_text()
    assert old in text
    (tmp_path / "bad.yaml").write_text(text.replace(old, new))
    with pytest.raises(UserError, match=words):
        load_machine(str(tmp_path / "bad.yaml"))


def test_plan_takes_the_file_for_another_layout(tmp_path: Path) -> None:
    write_machine(fit_machine(TWO_STEPS, "CPU", 8, 1, 2), tmp_path / "own.yaml", [])
    config = load_config(Path("configs/quickstart.yaml"), ["parallel.pipeline=2"])
    told = "\n".join(describe_plan(config, load_machine(str(tmp_path / "own.yaml"))))
    assert "predicted for CPU: a step in 0." in told
    with pytest.raises(UserError, match="CPU has no bf16; it has fp32"):
        list(describe_plan(config.model_copy(update={"train": config.train.model_copy(update={"precision": "bf16"})}),
                  load_machine(str(tmp_path / "own.yaml"))))  # fmt: skip


def measuring(folder: Path, **more: object) -> Run:
    """The run of a config that measures, not made."""
    values = parse_yaml(Path("configs/quickstart.yaml").read_text(), "quickstart")
    values |= {"measure": {"file": str(folder / "own.yaml"), **more}}
    return Run(folder / "run", parse_config(values, "test"))


def test_such_a_run_has_one_stage_and_is_done_when_the_file_is_there(tmp_path: Path) -> None:
    run = measuring(tmp_path)
    assert list(run.config.active_stages) == ["measure"]
    assert "is not written yet" in str(missing(run))
    (tmp_path / "own.yaml").touch()
    assert missing(run) is None


def test_it_goes_on_only_from_what_was_measured(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="h100 was not measured"):
        look(measuring(tmp_path, machine="h100"))
    look(measuring(tmp_path))
    fp8 = measuring(tmp_path)
    train = fp8.config.train.model_copy(update={"precision": "fp8"})
    with pytest.raises(UserError, match=r"no model\.target, fp8, prompts"):
        look(Run(tmp_path / "run", fp8.config.model_copy(update={"train": train})))


def test_a_measurement_is_a_run_of_its_own(tmp_path: Path) -> None:
    """Of minutes, of a name that any FILE gives, and of which no tracker hears."""
    path, shown = Path("configs/quickstart.yaml"), PlainConsole(file=io.StringIO(), width=200)
    words = ["stages.train.time=1-00:00:00", "track={mail: me@example.org, tensorboard: true}"]
    made = [config_of(path, words, tmp_path / at / "my box.yaml", None, shown) for at in "ab"]
    assert [one.stages.measure.time for one in made] == ["00:30:00"] * 2 and made[0].track == TrackConfig()
    assert all(re.fullmatch(r"quickstart-measure-my-box-[0-9a-f]{6}", one.run.name) for one in made)
    assert made[0].run.name != made[1].run.name
    assert "time limit 00:30:00, not stages.train.time (1-00:00:00)" in cast(io.StringIO, shown.file).getvalue()
    short = config_of(path, ["stages.train.time='10'"], tmp_path / "x.yaml", None, shown)
    assert short.stages.measure.time == "10"
    with pytest.raises(UserError, match="--machine FILE that it wrote itself; h100 is none"):
        config_of(path, [], tmp_path / "x.yaml", "h100", shown)


def test_a_machine_that_is_none_is_refused_in_sentences() -> None:
    for name, told in (
        ("nowhere", r"no such machine or file\. There are .*h100"),
        ("h10", r"did you mean h100\? There"),
    ):
        with pytest.raises(UserError, match=told):
            load_machine(name)


def bound_facts(place: RankInfo, each: dict[int, set[int]], per_node: int) -> tuple[str, float, int, int | None]:
    """What a rank says of its machine that may run on these CPUs."""
    os.sched_getaffinity = lambda pid: each[place.rank]
    return read_device_facts(
        groups.join_process_group(place, load_config(Path("configs/quickstart.yaml"))), 1, per_node
    )


def test_cores_are_those_of_all_ranks_of_a_node() -> None:
    """As with Slurm's task/affinity, where each rank sees its own; and on two nodes."""
    for each, per_node, cores in (
        ([{0}, {1}, {2}, {4}], 4, [4, 4, 4, 4]), ([{0, 1}, {1}, {0}, {0}], 2, [2, 2, 1, 1]),
    ):  # fmt: skip
        found = run_ranks(4, bound_facts, dict(enumerate(each)), per_node)
        assert [facts[-1] for facts in found] == cores


def small_exchanges(place: RankInfo) -> list[Exchange]:
    """Of fewer bytes than there are ranks of four bytes each."""
    from planning import calibrate

    calibrate._SIZES = (4,)  # type: ignore[assignment]
    found = [
        *calibrate.time_exchanges(
            groups.join_process_group(place, load_config(Path("configs/quickstart.yaml"))), place.world_size
        )
    ]
    dist.barrier()  # who leaves takes the store along
    return found


def test_more_ranks_than_values_still_exchange_some() -> None:
    assert {one.size for found in run_ranks(2, small_exchanges) for one in found} == {8}


@pytest.mark.story
def test_ranks_time_their_machine_through_the_door(tmp_path: Path) -> None:
    """Two ranks, then another layout that goes on from their file; the second file predicts; none is replaced."""
    small = ["model.dim=64", "model.layers=2", "data.sequence_length=32", f"run.root={tmp_path}"]
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"

    def submit(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "submit.py", "plan", "configs/quickstart.yaml", *small, *words]
        return subprocess.run(command, cwd=CODE_ROOT, capture_output=True, text=True, timeout=300)

    done = submit(f"--measure={first}")
    assert done.returncode == 0 and f"--machine {first}" in done.stdout, done.stdout + done.stderr
    timings = load_machine(str(first)).timings
    assert timings is not None and len(timings.products) == 15 and len(timings.steps) == 1
    assert {one.kind for one in timings.exchanges} == {"all_reduce", "all_gather", "reduce_scatter", "send"}
    assert {(one.ranks, one.between) for one in timings.exchanges} == {(2, False)}
    assert first.read_text().startswith(f"# Measured by `plan --measure` on {os.uname().nodename}, 2")
    done = submit(f"--measure={second}", f"--machine={first}", "parallel.tensor=2")
    assert done.returncode == 0, done.stdout + done.stderr
    machine = load_machine(str(second))
    assert machine.timings is not None and [one.work.tensor for one in machine.timings.steps] == [1, 2]
    assert machine.timings.exchanges == timings.exchanges
    assert "predicted for CPU" in submit(f"--machine={second}", "parallel.pipeline=2").stdout
    before = first.read_text()
    refused = submit(f"--measure={first}")
    assert refused.returncode == 2 and "name a file that does not exist yet" in refused.stderr
    assert first.read_text() == before
