"""What other frameworks call the keys of a config, and which key of Sluice to use instead.

The names are those of PyTorch Lightning, Hugging Face's Trainer, torchtitan, Megatron-LM, DeepSpeed and nanoGPT. A
config that uses one is refused; the message names our key, and has a sentence if the two do not mean the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Counterpart(NamedTuple):
    """The keys of Sluice to use instead of another framework's key."""

    keys: tuple[str, ...]
    """Dotted keys; none if there is nothing to set."""
    note: str = ""
    """What is different; "" if the two keys mean the same."""

    def describe(self) -> str:
        """Return the keys to use, and the note, in words."""
        return ": ".join(filter(None, [f"use {' and '.join(self.keys)}" * bool(self.keys), self.note]))


def _same(key: str, *names: str) -> dict[str, Counterpart]:
    """Return entries for `names`, which mean the same as `key`."""
    return dict.fromkeys(names, Counterpart((key,)))


def _other(keys: str, note: str, *names: str) -> dict[str, Counterpart]:
    """Return entries for `names`, for which `keys`, separated by blanks, are used in the way that `note` says."""
    return dict.fromkeys(names, Counterpart(tuple(keys.split()), note))


OTHER_NAMES: Mapping[str, Counterpart] = {
    # batch and length
    **_same("train.global_batch", "batch_size", "global_batch_size", "train_batch_size"),
    **_same("train.micro_batch", "micro_batch_size", "train_micro_batch_size_per_gpu"),
    **_other(
        "train.micro_batch train.global_batch",
        "micro_batch is the sequences of one forward pass on a rank, global_batch those of a whole step",
        "per_device_train_batch_size", "local_batch_size",
    ),
    **_other(
        "train.global_batch train.micro_batch",
        "the number of accumulated micro-batches is derived: global_batch / (micro_batch × data-parallel replicas)",
        "gradient_accumulation_steps", "gradient_accumulation", "accumulate_grad_batches", "grad_accum_steps",
    ),
    **_same("evaluate.batch", "per_device_eval_batch_size", "eval_batch_size"),
    **_same(
        "data.sequence_length", "block_size", "context_length", "seq_len", "seq_length", "max_seq_length",
        "max_length",
    ),
    # length of the training
    **_same("train.steps", "max_steps", "num_steps", "max_iters", "train_iters", "total_steps"),
    **_same("train.epochs", "num_epochs", "num_train_epochs", "max_epochs"),
    **_other(
        "train.steps train.epochs", "the schedule always ends at the last step",
        "lr_decay_iters", "lr_decay_steps",
    ),
    # optimizer
    **_same("optimizer.lr", "learning_rate"),
    **_same("optimizer.name", "optimizer", "optimizer.kind", "optimizer.type", "optim"),
    **_same("optimizer.clip_norm", "gradient_clipping", "max_grad_norm", "gradient_clip_val", "clip_grad", "grad_clip"),
    **_other("optimizer.clip_norm", "clipping is by the norm of the whole gradient", "gradient_clip_algorithm"),
    **_other(
        "optimizer.betas", "write both as a list, [beta1, beta2]",
        "adam_beta1", "adam_beta2", "beta1", "beta2",
    ),
    **_same("optimizer.eps", "adam_epsilon", "adam_eps"),
    **_same("optimizer.warmup_steps", "lr_warmup_iters", "lr_warmup_steps", "warmup_iters", "num_warmup_steps"),
    **_other(
        "optimizer.warmup_steps", "it is a number of steps, not a fraction of them",
        "warmup_ratio", "lr_warmup_fraction",
    ),
    **_same("optimizer.schedule", "lr_scheduler_type", "lr_scheduler", "lr_decay_style", "decay_type"),
    **_other("optimizer.schedule", "`constant` does not decay", "decay_lr"),
    **_other("optimizer.min_lr_ratio", "it is a fraction of optimizer.lr, not a learning rate", "min_lr"),
    # arithmetic
    **_other(
        "train.precision", "write bf16, fp16, fp8 or fp32",
        "bf16", "fp16", "fp8", "tf32", "bf16.enabled", "fp16.enabled", "mixed_precision", "mixed_precision_param",
    ),
    **_same("train.compile", "torch_compile", "compile_model"),
    **_same(
        "parallel.activation_checkpointing", "gradient_checkpointing", "recompute_activations",
        "recompute_granularity", "activation_checkpoint", "activation_checkpoint.mode",
    ),
    # layout
    **_same("parallel.tensor", "tensor_parallel_degree", "tensor_model_parallel_size", "tensor_parallel_size"),
    **_same(
        "parallel.pipeline", "pipeline_parallel_degree", "pipeline_model_parallel_size", "pipeline_parallel_size"
    ),
    **_same("parallel.schedule", "pipeline_parallel_schedule"),
    **_other(
        "parallel.virtual_stages", "it is the number of stages of each rank",
        "num_layers_per_virtual_pipeline_stage", "virtual_pipeline_model_parallel_size",
    ),
    **_same("parallel.data.replicate", "data_parallel_replicate_degree"),
    **_same("parallel.data.shard", "data_parallel_shard_degree"),
    **_other(
        "parallel.data", "`auto` uses all ranks that tensor and pipeline leave",
        "data_parallel_size", "data_parallel_degree",
    ),
    **_other(
        "", "Sluice has no context parallelism: split long sequences by parallel.tensor with parallel.sequence",
        "context_parallel_degree", "context_parallel_size",
    ),
    **_same("parallel.sequence", "sequence_parallel"),
    **_same("parallel.zero", "zero_stage", "zero_optimization", "zero_optimization.stage"),
    **_other(
        "parallel.zero", "0 is DDP, 1 shards optimizer state, 2 also gradients (SHARD_GRAD_OP), 3 also parameters "
        "(FULL_SHARD)",
        "fsdp", "fsdp_config", "sharding_strategy", "deepspeed", "use_distributed_optimizer",
    ),
    **_other(
        "parallel.zero parallel.tensor parallel.pipeline",
        "ddp is zero 0, fsdp and deepspeed_stage_3 are zero 3; tensor and pipeline split the model", "strategy",
    ),
    **_same("parallel.offload", "offload_optimizer", "offload_param", "cpu_offload", "enable_cpu_offload"),
    **_same("parallel.backend", "ddp_backend", "process_group_backend", "distributed_backend"),
    **_other(
        "stages.train.tasks_per_node", "each training process uses one GPU",
        "devices", "gpus", "num_gpus", "nproc_per_node", "num_processes", "ntasks_per_node",
    ),
    **_same("stages.train.nodes", "num_nodes", "nnodes", "num_machines"),
    **_other("", "ranks use GPUs if there are any; parallel.backend chooses how they communicate", "accelerator"),
    # model
    **_same("model.dim", "hidden_size", "n_embd", "d_model", "embed_dim"),
    **_same("model.layers", "n_layers", "n_layer", "num_hidden_layers", "num_layers"),
    **_same("model.heads", "num_attention_heads", "n_head", "n_heads", "num_heads"),
    **_same("model.kv_heads", "num_key_value_heads", "num_query_groups", "n_kv_heads"),
    **_same("model.intermediate_size", "ffn_hidden_size", "ffn_dim"),
    **_same("model.init_from", "model_name_or_path", "pretrained_model_name_or_path", "hf_assets_path"),
    # data
    **_other(
        "data.source", "name files or folders; nothing is downloaded",
        "dataset", "dataset_name", "dataset_path", "train_file", "data_path",
    ),
    **_other(
        "data.tokenizer.path", "with data.tokenizer.kind: file",
        "tokenizer_path", "tokenizer_model", "tokenizer_name",
    ),
    **_other(
        "", "there are no loader processes: a thread of each rank reads ahead",
        "dataloader_num_workers", "num_workers", "dataloader_pin_memory", "pin_memory",
    ),
    # files, logging, evaluation
    **_other(
        "run.root run.name", "a run is the directory ROOT/NAME",
        "output_dir", "out_dir", "default_root_dir", "dump_folder", "save_dir", "save",
    ),
    **_same("checkpoint.every_steps", "save_every", "save_steps", "save_interval", "checkpoint_interval"),
    **_same("checkpoint.keep", "save_total_limit", "save_top_k", "keep_latest_k"),
    **_other(
        "", "submit.py continues from the newest checkpoint by itself; `resume RUN` does so after a stop",
        "resume_from_checkpoint", "ckpt_path", "load_checkpoint",
    ),
    **_same("train.log_every", "logging_steps", "log_every_n_steps", "log_interval", "log_freq"),
    **_other(
        "train.evaluate_every", "it counts steps",
        "eval_steps", "eval_interval", "val_check_interval", "eval_every", "check_val_every_n_epoch",
    ),
    **_same("train.evaluate_sequences", "limit_val_batches", "eval_iters"),
    **_other(
        "track.tensorboard track.wandb track.mlflow", "each is a key of its own",
        "report_to", "logger", "wandb_project", "wandb_log", "enable_wandb", "enable_tensorboard",
    ),
    **_same("publish.to", "push_to_hub", "hub_model_id"),
}  # fmt: skip
"""By a key's name; with the section before it if the bare name says too little."""


def counterpart(path: Sequence[str | int]) -> Counterpart | None:
    """Return what to use instead of the key at `path`, by the longest end of the path that the table has."""
    names = [str(part).lower().replace("-", "_").lstrip("_") for part in path]
    ends = (".".join(names[start:]) for start in range(len(names)))
    return next((OTHER_NAMES[end] for end in ends if end in OTHER_NAMES), None)


def inner_counterparts(path: Sequence[str | int], value: Any) -> Iterator[tuple[str, Counterpart]]:
    """Yield what to use instead of the keys in the mapping `value`, which is at `path`, by the name of each."""
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        if known := counterpart((*path, key)):
            yield str(key), known
        elif isinstance(inner, Mapping):
            yield from inner_counterparts((*path, key), inner)
