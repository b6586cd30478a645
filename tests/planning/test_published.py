"""Tests of `python -m benchmarks.plan FILE.csv`, which compares predictions with published runs and fits constants."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from benchmarks.plan import (
    correlate_layout_order,
    fit_constants,
    fit_without_source,
    main,
    predict_tokens_per_s,
)
from benchmarks.published import parse_precision, read_rows
from planning.predict import DEFAULT

VALID_ROW = {
    "id": "a", "source": "made up", "year": "2024", "model": "m", "params_b": "8", "layers": "32", "hidden": "4096",
    "heads": "32", "kv_heads": "8", "ffn": "14336", "vocab": "128256", "seq_len": "8192", "gpu": "H100-80GB",
    "gpus": "64", "gpus_per_node": "8", "dp_total": "64", "dp_shard_degree": "64", "zero_stage": "3", "tp": "1",
    "pp": "1", "cp": "1", "ep": "1", "micro_batch": "1", "global_batch_seqs": "128", "precision": "bf16",
    "activation_ckpt": "selective", "compile": "yes", "mlp_mats": "3", "tokens_per_s_per_gpu": "7000", "mem_gb": "40",
}  # fmt: skip
"""A row with all required columns of a file of published runs."""


def write_rows(path: Path, *changes: dict[str, str]) -> Path:
    """Write a CSV file with one row, numbered from 0, for each dict of values that differ from `VALID_ROW`."""
    rows = [VALID_ROW | {"id": str(number)} | change for number, change in enumerate(changes)]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_read_rows_returns_supported_rows_and_reports_the_others(tmp_path: Path) -> None:
    supported_rows: list[dict[str, str]] = [
        {},
        {"tokens_per_s_per_gpu": "", "tokens_per_s_per_gpu_derived": "6500"},
        {"gpu": "H20"}, {"gpu": "GB200 NVL72", "precision": "fp4"}, {"gpu": "V100-32GB", "precision": "fp16"},
        {"gpu": "MI300X", "activation_ckpt": "recompute_modules=[core_attn, mlp]"},
        {"gpu": "H800", "precision": "fp8"}, {"gpu": "TPU v5p"}, {"gpu": "A100-40GB", "vocab": ""},
        {"cp": "4", "dp_total": "16", "dp_shard_degree": "16"},
        {"model": "Mixtral-8x7B", "ep": "8", "moe_notes": "8 experts, top-2", "params_b": "46.7", "n_matmul_b": "12.7"},
        {"model": "8x7B", "n_matmul_b": ""},
        {"model": "x-A3B", "ep": "8", "params_b": "30", "n_matmul_b": "9"},
        {"pp": "8", "dp_total": "8", "dp_shard_degree": "8", "zero_stage": "1", "schedule": "interleaved 1F1B",
         "virtual_stages": "2", "source": "NeMo"},
        {"pp": "8", "dp_total": "8", "dp_shard_degree": "8", "zero_stage": "1", "schedule": "DualPipe", "ep": "8",
         "params_b": "30", "n_matmul_b": "9", "global_batch_seqs": "256"},
        {"pp": "8", "dp_total": "8", "zero_stage": "0", "schedule": "ZB-2p", "micro_batch": "", "activation_ckpt": ""},
    ]  # fmt: skip
    unsupported_rows = [  # with a part of the reported reason
        ({"layers": ""}, "layers is missing"),
        ({"tokens_per_s_per_gpu": ""}, "tokens_per_s_per_gpu"),
        ({"gpu": "Ascend 910B"}, "no machine file for Ascend 910B"),
        ({"gpu": "A100-80GB", "precision": "fp8"}, "has no fp8"),
        ({"seq_len": "long"}, "seq_len is 'long'"),
        ({"micro_batch": "0"}, "by zero"),
    ]
    path = write_rows(tmp_path / "f.csv", *supported_rows, *(row for row, _ in unsupported_rows))
    rows, problems = read_rows(path)
    assert [row.id for row in rows] == [str(number) for number in range(len(supported_rows))]
    for number, ((row_id, reason), (_, expected_reason)) in enumerate(zip(problems, unsupported_rows, strict=True)):
        assert row_id == str(len(supported_rows) + number) and expected_reason in reason
    assert all(500 < predict_tokens_per_s(row) < 50_000 for row in rows)
    mixtral_workload = rows[10].work
    assert (mixtral_workload.experts, mixtral_workload.active, mixtral_workload.expert) == (8, 2, 8)
    assert 12e3 < mixtral_workload.ffn < 15e3
    a3b_workload = rows[12].work  # the number of experts is derived from the number of parameters
    expert_parameters = a3b_workload.experts * a3b_workload.expert_weights * a3b_workload.layers
    # 30e9 parameters, without 1.3e9 of attention and 1.1e9 of the embedding and the output layer
    assert expert_parameters == pytest.approx(27.6e9, rel=0.1)


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("bf16", "bf16"), ("bf16+fp32grad", "bf16"), ("BF16 + FP32 grads", "bf16"), ("fp32-grad bf16", "bf16"),
        ("bf16, fp32 master weights", "bf16"), ("bf16/fp8-comm", "bf16"), ("bfloat16 (float32 reduce)", "bf16"),
        ("fp8-amp(TE)", "fp8"), ("bf16+fp8", "fp8"), ("float8_e4m3", "fp8"), ("nvfp4", "fp4"), ("fp16+fp32", "fp16"),
        ("fp32", "fp32"), ("tf32", "bf16"), ("", "bf16"),
    ],
)  # fmt: skip
def test_parse_precision_returns_the_precision_of_matrix_products(text: str, precision: str) -> None:
    assert parse_precision(text) == precision


def test_fp32_gradients_predict_the_same_throughput_as_bf16(tmp_path: Path) -> None:
    rows, unsupported = read_rows(write_rows(tmp_path / "f.csv", {}, {"precision": "bf16+fp32grad"}))
    assert unsupported == [] and predict_tokens_per_s(rows[0]) == predict_tokens_per_s(rows[1])


def test_main_prints_the_errors_in_the_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "f.csv", {}, {"source": "other", "gpus": "128", "mem_gb": ""}, {"layers": ""})
    monkeypatch.setattr("sys.argv", ["benchmarks.plan", str(path)])
    main()
    *_, second_to_last, last = capsys.readouterr().out.splitlines()
    assert second_to_last == "not supported: 1 of 3 rows"
    number = r"\d+\.\d"
    # `rank` is the correlation of layout orders. Without four rows of one source and model, it is NaN.
    assert re.fullmatch(rf"median error {number} %, p90 {number} %, memory {number} %, rank nan over 2 rows", last)


def test_fitted_constants_predict_rows_computed_with_other_constants(tmp_path: Path) -> None:
    """The rows are computed with constants that differ from the defaults.

    A fit without the rows of one of the two sources finds the same value of the constant `matmul`.
    """
    from dataclasses import replace

    layouts = [
        {"gpus": str(gpus), "seq_len": length, "dp_total": str(gpus), "dp_shard_degree": str(gpus), "source": source,
         "global_batch_seqs": str(2 * gpus), "compile": compiled}
        for gpus in (8, 64) for length in ("2048", "32768") for compiled in ("yes", "no") for source in ("x", "y")
    ]  # fmt: skip
    rows, _ = read_rows(write_rows(tmp_path / "f.csv", *layouts))
    true_constants = replace(DEFAULT, matmul=0.75, attention=0.6, eager=2.3)
    rows = [replace(row, tokens=predict_tokens_per_s(row, true_constants)) for row in rows]
    constants, slopes, offset = fit_constants(rows)
    largest_error = max(abs(predict_tokens_per_s(row, constants) / row.tokens - 1) for row in rows)
    largest_default_error = max(abs(predict_tokens_per_s(row) / row.tokens - 1) for row in rows)
    assert largest_error < 0.03 < largest_default_error
    without_x = fit_without_source(rows, "x", slopes, offset, constants)
    assert without_x.matmul == pytest.approx(constants.matmul, rel=0.02)
    assert correlate_layout_order(rows, [row.tokens for row in rows]) == pytest.approx(1.0)
    assert correlate_layout_order(rows, [-row.tokens for row in rows]) == pytest.approx(-1.0)
