"""Build, load and save a causal language model of the package transformers.

The content of config.json is in the run's config (`model.options`), so a run can build its model without the folder.
Only classes of the installed package are used: code in the folder is never executed (`trust_remote_code`). The package
is imported when a function is called, because most runs do not need it.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipeline.base.errors import UserError
from pipeline.base.files import fsync, write_json
from pipeline.comm.groups import all_gather_results, broadcast_from_rank0
from pipeline.config.hugging_face import (
    CONFIG_FILE,
    INDEX_FILE,
    SINGLE_WEIGHTS_FILE,
    ModelFolderError,
    list_weight_files,
    open_inside,
)
from pipeline.config.sections import ModelConfig
from pipeline.model.decoder import local_slices, local_tensor
from pipeline.parallel.host_tensor import HostTensor

STORED_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of weights in safetensors files that can be read."""

_IGNORED_KEYS = {
    "attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation", "auto_map",
}  # fmt: skip
"""Keys of config.json that select an implementation. It could be one on the Hub."""


class TransformersModel(nn.Module):
    """A language model of transformers with the interface of the decoder: token ids in, logits out.

    Args:
        model: the model of transformers.
        compute_dtype: the type of autocast; None: fp32.
    """

    def __init__(self, model: Any, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.model = model
        self._compute_dtype = compute_dtype
        self._cache: Any = None
        """Keys and values of earlier tokens, in the format of transformers; None at the beginning of a text."""
        self._earlier_tokens: Tensor | None = None
        """The tokens of earlier calls of `predict_next`."""
        self._buffers_by_name = dict(model.named_buffers())
        """The tables that the model computes when it is built, such as the frequencies of rotary positions."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        all_names = model.named_parameters(remove_duplicate=False)
        self._tied_names = [(name, names[id(weight)]) for name, weight in all_names if names[id(weight)] != name]
        """Pairs of names of one parameter. `named_parameters` yields the second one."""

    def forward(self, tokens_BT: Tensor, starts_BT: HostTensor | Tensor | None = None) -> Tensor:
        """Return the logits of the next tokens: shape (B, T, V).

        Args:
            tokens_BT: token ids (int64).
            starts_BT: whether a token is the first one of a document (bool). Attention then stays inside documents, and
                positions start at 0 in each of them. None: each sequence is one document.
        """
        positions = {}
        if starts_BT is not None:
            host_starts_BT = starts_BT.tensor if isinstance(starts_BT, HostTensor) else starts_BT
            positions["position_ids"] = compute_positions(host_starts_BT).to(tokens_BT.device)
        dtype = self._compute_dtype
        with torch.autocast(tokens_BT.device.type, dtype, enabled=dtype is not None):
            logits_BTV: Tensor = self.model(tokens_BT, use_cache=False, **positions).logits
        return logits_BTV

    def predict_next(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits of the token after the last one: (B, V).

        Calls with `tokens_BT` (int64) continue the text of earlier calls, whose keys and values are remembered. If the
        model has no such cache, the whole text is computed again.
        """
        earlier_BT = self._earlier_tokens
        self._earlier_tokens = tokens_BT if earlier_BT is None else torch.cat([earlier_BT, tokens_BT], dim=1)
        if earlier_BT is not None and self._cache is None:
            outputs = self.model(self._earlier_tokens, use_cache=False)
        else:
            outputs = self.model(tokens_BT, past_key_values=self._cache, use_cache=True)
            self._cache = getattr(outputs, "past_key_values", None)
        logits_BV: Tensor = outputs.logits[:, -1]
        return logits_BV

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter with its name in the model of transformers."""
        yield from self.model.named_parameters()

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks of the model, in their order. Raises UserError if the model has no list of blocks."""
        count = self.model.config.num_hidden_layers
        lists = [each for each in self.model.modules() if isinstance(each, nn.ModuleList) and len(each) == count]
        if not lists:
            raise UserError(
                "model.no_blocks", f"model.init_from: {type(self.model).__name__} has no list of {count} blocks"
            )
        return list(lists[0])  # `modules` yields outer lists first.

    @torch.no_grad()
    def restore_after_allocation(self, device: torch.device) -> None:
        """Set the buffers and tie the weights again after `to_empty`, which does neither."""
        for name, values in self._buffers_by_name.items():
            parent, _, attribute = name.rpartition(".")
            self.model.get_submodule(parent)._buffers[attribute] = values.to(device)
        for name, original_name in self._tied_names:
            parent, _, attribute = name.rpartition(".")
            setattr(self.model.get_submodule(parent), attribute, self.model.get_parameter(original_name))


def compute_positions(starts_BT: Tensor) -> Tensor:
    """Return the position of each token in its document (int64), for the first tokens of documents (bool)."""
    indices_T = torch.arange(starts_BT.shape[1], device=starts_BT.device)
    first_BT = torch.where(starts_BT, indices_T, 0).cummax(dim=1).values
    return indices_T - first_BT


class _EmptyOnMeta(TorchFunctionMode):
    """Create uninitialized tensors on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty:
            kwargs = {**(kwargs or {}), "device": "meta"}
        return func(*args, **(kwargs or {}))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Create parameters without memory in this block. Buffers have values, because models compute them when built."""
    register_parameter = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register_parameter(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment, method-assign]
    try:
        with _EmptyOnMeta():
            yield
    finally:
        nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]


def build_model(model: ModelConfig) -> Any:
    """Return the model of transformers with fp32 parameters on the meta device, in training mode.

    Raises UserError if transformers cannot build the model, or if the model has trained values other than parameters.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # of loading and saving
    try:
        with _parameters_on_meta():
            hf_model = AutoModelForCausalLM.from_config(
                _make_hf_config(model), attn_implementation=_choose_attention(model), dtype=torch.float32
            )
            hf_model.tie_weights()
    except Exception as error:  # The classes of transformers raise errors of many types.
        raise UserError(
            "model.build_failed",
            f"{_name_config(model)}: transformers cannot build the model: {type(error).__name__}: {error}",
        ) from error
    for name, buffer in hf_model.named_buffers():
        parent, _, attribute = name.rpartition(".")
        if buffer.is_meta or attribute not in hf_model.get_submodule(parent)._non_persistent_buffers_set:
            raise UserError(
                "model.persistent_buffer",
                f"{_name_config(model)}: {type(hf_model).__name__} has the buffer {name}, which training would not "
                "update: this model is not supported",
            )
    return hf_model.train()


def _make_hf_config(model: ModelConfig) -> Any:
    """Return the configuration of transformers for `model.options`, without keys that select other code."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**{key: value for key, value in model.options.items() if key not in _IGNORED_KEYS})


def _choose_attention(model: ModelConfig) -> str:
    """Return the implementation of attention: torch's, or that of the model if it does not support torch's."""
    from transformers import AutoModelForCausalLM

    model_class = AutoModelForCausalLM._model_mapping[type(_make_hf_config(model))]
    return "sdpa" if model_class._supports_sdpa else "eager"


def _name_config(model: ModelConfig) -> str:
    """Return the path of config.json for messages."""
    return f"model.init_from: {model.init_from}/{CONFIG_FILE}"


@dataclass(frozen=True)
class PretrainedWeights:
    """The weights of a folder, as transformers loads them.

    Rank 0 loads the whole model into host memory and broadcasts one weight after another, because transformers may
    compute a weight from several tensors of the folder, such as those of experts.
    """

    model: ModelConfig
    stored_types: frozenset[str]
    """The types of the weights in the files, as safetensors names them."""
    group: dist.ProcessGroup | None
    """A Gloo group of all ranks; None for one process."""
    write_source: Callable[[], object] = lambda: None
    """See `WeightSource` in pipeline/model/open_weights.py."""

    @cached_property
    def _weights(self) -> Mapping[str, Tensor]:
        """All weights by name, in the type in which they are stored. If there are several types, in fp32."""
        from transformers import AutoModelForCausalLM

        folder = self.model.init_from
        assert folder is not None
        dtype = STORED_TYPES[next(iter(self.stored_types))] if len(self.stored_types) == 1 else torch.float32
        try:
            with _link_weight_files(folder) as links:
                hf_model, report = AutoModelForCausalLM.from_pretrained(
                    links, config=_make_hf_config(self.model), attn_implementation=_choose_attention(self.model),
                    dtype=dtype, use_safetensors=True, trust_remote_code=False, local_files_only=True,
                    output_loading_info=True, ignore_mismatched_sizes=True,
                )  # fmt: skip
        except ModelFolderError:
            raise
        except Exception as error:  # Loading raises errors of many types.
            raise UserError(
                "model.load_failed", f"{folder}: transformers cannot load the weights: {type(error).__name__}: {error}"
            ) from error
        problems = {
            "missing_keys": ("model.missing_tensor", "the files have no values for the parameter"),
            "mismatched_keys": ("model.wrong_shape", f"the files and {CONFIG_FILE} have different shapes of"),
            "unexpected_keys": (
                "model.unexpected_tensor",
                f"the model of {CONFIG_FILE} has no parameter for the tensor",
            ),
        }
        for kind, (code, problem) in problems.items():
            for key in sorted(report[kind]):
                name = key if isinstance(key, str) else key[0]
                raise UserError(code, f"{folder}: {problem} {name}: download the folder again")
        weights = dict(hf_model.named_parameters())
        expected_names = {name for name, _ in build_model(self.model).named_parameters()}
        if names := sorted(weights.keys() ^ expected_names):
            # If the files have another output layer than the embedding, transformers does not tie them.
            raise UserError(
                "model.untied_weights",
                f"{folder}: the files have other values for {names[0]} than for the weight with which {CONFIG_FILE} "
                "ties it: set tie_word_embeddings to false there",
            )
        return weights

    def read(self, name: str) -> Tensor:
        """Return a whole weight, in one process."""
        return self._weights[name].detach()

    @torch.no_grad()
    def copy_into(self, weights: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Copy this rank's part of each weight to its parameter and convert it to the parameter's type.

        Args:
            weights: parameters with their names in the whole model; the same names in the same order on all ranks.
        """
        group = self.group
        is_sender = group is None or dist.get_rank(group) == 0
        if group is not None:
            all_gather_results(group, lambda: len(self._weights) if is_sender else 0)  # raises its error on all ranks
        for name, parameter in weights:
            values = self._weights[name].detach() if is_sender else torch.empty(0)
            if group is not None:
                dtype = broadcast_from_rank0(group, values.dtype)
                values = values.contiguous() if is_sender else torch.empty(parameter.shape, dtype=dtype)
                dist.broadcast(values, group_src=0, group=group)
            part = local_tensor(parameter)
            if part.numel():
                part.copy_(values[local_slices(parameter)])


@contextmanager
def _link_weight_files(folder: Path) -> Iterator[str]:
    """Yield a temporary folder with links to exactly the weight files that Sluice checks and hashes.

    transformers would also read other files of `folder`, such as adapters, and follow links out of it.
    """
    with TemporaryDirectory() as links, ExitStack() as stack:
        for name in [INDEX_FILE, *list_weight_files(folder)]:
            if name == INDEX_FILE and list_weight_files(folder) == [SINGLE_WEIGHTS_FILE]:
                continue
            path = stack.enter_context(open_inside(folder, name))
            # Links to /proc/self/fd would lead nowhere in another process, but only this one reads them.
            Path(links, name).symlink_to(path)
        write_json(Path(links, "generation_config.json"), {})  # transformers requires the file.
        yield links


def save_weights(
    model: ModelConfig, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, folder: Path, max_file_bytes: int
) -> int:
    """Write the weights as transformers does, with the names of the original folder. Return the bytes of all tensors.

    The whole model must fit into host memory in `dtype`.

    Args:
        model: the section `model` of the config.
        weights: all weights with their names.
        dtype: the type to which weights are converted.
        folder: where the safetensors files and, if there are several, their index are written.
        max_file_bytes: the maximum size of a file in bytes.
    """
    wrapper = TransformersModel(build_model(model))
    hf_model = wrapper.model.to(dtype)
    hf_model.to_empty(device="cpu")
    wrapper.restore_after_allocation(torch.device("cpu"))
    with torch.no_grad():
        for name, values in weights:
            hf_model.get_parameter(name).copy_(values)
    temporary = folder / ".weights"
    hf_model.save_pretrained(temporary, max_shard_size=max_file_bytes)
    total_bytes = 0
    for path in sorted(temporary.glob("*.safetensors*")):
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                slices = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118
                total_bytes += sum(math.prod(each.get_shape()) * dtype.itemsize for each in slices)
        fsync(path)
        path.rename(folder / path.name)
    shutil.rmtree(temporary)
    return total_bytes
