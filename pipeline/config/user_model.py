"""Find and check the user's modules: a custom model (`model.target`), and callbacks (`train.callbacks`).

A module of `train.callbacks` needs only the function `callbacks` that is described below. A custom model:

    model: {target: my_package.my_model, options: {width: 64}, layers: 6}
    data:  {source: "/data/images-*.h5", held_out: 0.1}

Instead of HDF5 files, the samples may come from a dataset of the module (see `dataset` below):

    data:  {source: "/data/images-*.tar", workers: 4}

The module sets these names at its top level. The values are written as constants, so that Sluice can read them without
importing the module:

    ARRAYS = ("images", "labels")   the arrays of a sample: HDF5 datasets with the samples along the first dimension
    INPUTS = ("images",)            the arrays that the `forward` of the model takes, in this order
    PADDED = ("words",)             optional: arrays with padding in the second dimension. Then ARRAYS must contain
                                    `lengths`: sample i has `lengths[i]` entries. Sluice balances the lengths over the
                                    ranks. Without a pipeline, each micro-batch is truncated to its longest sample
    LOSS = "batch"                  optional: `loss` compares the samples of a micro-batch with each other, as
                                    contrastive losses do. It returns the loss of the micro-batch, such as a mean over
                                    its samples. Default: "sum"
    ELEMENTWISE = True              optional: `optimizer` returns optimizers that update each entry of a parameter
                                    independently of all other entries, as Adam does. Then they work with ZeRO, tensor
                                    and pipeline parallelism. Sluice checks this with small parameters
    CUTS = True                     optional: `build` can return any part of the model (parallel.pipeline > 1)
    DATASET_VERSION = "2"           optional: change this value when `dataset` returns other samples. Checkpoints of
                                    another version are not used

The module also defines, or imports by name, these functions. A batch is a dict of tensors by the names of ARRAYS. The
tensors have the types of the files and the samples along the first dimension:

    build(options, layers) -> Module   the model with the blocks `layers`, a range. Without CUTS, `layers` is always
                                       range(options["layers"]), the value of `model.layers` in the config. With CUTS,
                                       it may be a part of this range. The part with block 0 takes INPUTS. Any other
                                       part takes the one tensor that the previous part returns. The parameters of a
                                       block have the same names in every part
    loss(outputs, batch) -> Tensor     the *sum* of the loss over the samples; with `lengths`, over their entries,
                                       without padding. Micro-batches and ranks add their sums. The result is divided
                                       by the number of samples, or entries, of the global batch. The loss of a sample
                                       must not depend on other samples. `loss` must also accept a single sample.
                                       With LOSS = "batch": the loss of a whole micro-batch. Sluice averages these
                                       losses over the micro-batches and ranks of a step. An evaluation calls `loss`
                                       with `train.micro_batch` samples as well. With `train.gather`, `outputs` are
                                       those of all data-parallel ranks, and `batch` has the arrays of these samples
                                       that are not in INPUTS
    metrics(outputs, batch) -> dict    optional: further sums by name, which the evaluation adds to its result
    dataset(options, split)            optional: a torch.utils.data.Dataset with the samples of `split`, "train" or
                                       "held_out". `dataset[i]` returns a dict of numpy arrays, tensors or numbers by
                                       the names of ARRAYS. `options` is the argument of `build`. If `data.source` is
                                       set, `options["source"]` is a list of absolute paths. `data.workers` processes
                                       of each rank call the function and read samples. Before each sample, the global
                                       generators of random, numpy and torch are seeded: for training from the run's
                                       seed and the position of the sample in the run, for held-out samples from `i`.
                                       For "train", the result may be an IterableDataset with the methods `state_dict`
                                       and `load_state_dict`. `get_worker_info().id` and `num_workers` then number the
                                       workers of all data-parallel ranks, and each must yield its own part
    transform(sample, random) -> dict  optional: what the model receives of a sample, such as a random crop. The arrays
                                       must have the same names, and the same shapes and types for all samples.
                                       `sample`: read-only numpy arrays of the file. `random`: a numpy Generator, or
                                       None for held-out samples. Its seed depends only on the run's seed and the
                                       position of the sample in the run, so restarts and other layouts do not change
                                       it. The thread or process that reads samples calls the function for one sample
                                       at a time
    init(name, values, options)        optional: fills `values`, the whole parameter `name` in fp32 on the CPU, from
                                       torch's seeded generator. By default, matrices are normal with the standard
                                       deviation `model.initializer_range`, vectors called `weight` are 1, and other
                                       vectors are 0
    blocks(model) -> list of Module    optional: the modules that ZeRO gathers, activation checkpointing recomputes and
                                       torch.compile compiles one by one. fp8 and Muon apply to the matrices of these
                                       modules. Without `blocks`, ZeRO gathers the whole model at once
    optimizer(parameters, config)      optional (optimizer.name: own): a torch optimizer for `parameters`, a list of
                                       (name, parameter), or a dict of optimizers by name. `config` has the keys of the
                                       section `optimizer`, such as `config.lr`. The state of the optimizer must consist
                                       of tensors. The schedule scales the learning rates of all parameter groups by the
                                       same factor. Each rank must hold a whole replica (DDP), unless ELEMENTWISE is set
    training_step(engine, batch)       optional: runs a whole step, with several backward passes or optimizers. It
                                       returns a dict of metrics with at least `loss`. `engine` is a `StepEngine`
                                       (pipeline/train/training_step.py). `loss` is then only used in evaluations
    learning_rate(config, step, steps) optional (optimizer.schedule: own): the learning rate of `step`, from 1 to
                                       `steps`. The result must depend on the arguments only. Otherwise, a restart
                                       changes the result of the run
    callbacks(config) -> list          optional: objects derived from `pipeline.train.callback.Callback`, with hooks
                                       that the trainer calls. `config` is the whole config (docs/callbacks.md)
    tensor_plan(options) -> dict       optional (parallel.tensor > 1): a `parallelize_module` plan. It must name every
                                       module with parameters. `pipeline.tensor_parallel.Replicated()` does not split a
                                       module

The model is built without memory (on the meta device), and `init` fills its parameters. `__init__` must therefore not
set values. A module with (non-persistent) buffers needs a method `reset_buffers()` that fills them. Persistent buffers
are errors: they depend on earlier batches, so they would differ between layouts. The exception is torch's batch norm.
It normalizes over the micro-batch of all data-parallel ranks (SyncBatchNorm), and its running statistics are saved.

The module is searched in the working directory, PYTHONPATH and the installed packages. The `code/` of the run receives
a copy of its top-level package, which the jobs import. If the module is a single file, the files that it imports from
its folder are copied as well. pipeline/config/user_model.py does not import torch, so the login node can check what the
module supports.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from pipeline.base.errors import UserError
from pipeline.config.datasets import DataConfig
from pipeline.config.sections import Config

_HELP = "pipeline/config/user_model.py describes the contents of such a module"
_CALLBACKS_HELP = "docs/callbacks.md describes the contents of a module with callbacks"
LENGTHS_ARRAY = "lengths"
"""The array with the length of each sample."""
UNREAD_OPTIONS = "model.options that no build reads: "
"""The start of the output line that lists unread options. The process that tries to build a model prints this line."""


@dataclass(frozen=True)
class UserModule:
    """A module of `train.callbacks`: the facts that can be read from its source without importing it."""

    key: ClassVar[str] = "train.callbacks"
    """The config key that names the module, for messages."""
    target: str
    """The dotted name of the module."""
    root: Path
    """The top-level package (a folder) or the module (a file)."""
    names: frozenset[str]
    """The names that the module defines or imports at its top level, without CUTS and ELEMENTWISE if they are False."""

    def load(self, code_dir: Path) -> ModuleType:
        """Import and return the module.

        Args:
            code_dir: the folder that contains the top-level package, such as the run's `code/`. If the Python path does
                not contain it yet, it becomes the first folder of the path.

        Raises:
            UserError: if an import raises ImportError, or if Python finds another module of the same name.
        """
        if str(code_dir) not in sys.path:
            sys.path.insert(0, str(code_dir))
        try:
            module = importlib.import_module(self.target)
            if self.root not in Path(str(module.__file__)).parents and self.root != Path(str(module.__file__)):
                raise ImportError(f"{module.__file__} was imported instead; rename {self.root.name}")
            return module
        except ImportError as error:
            raise UserError(
                "model.import_failed",
                f"{self.key}: {self.target} cannot be imported: {error}; install the packages that it imports, or "
                "add their folder to PYTHONPATH in site.setup",
            ) from error


@dataclass(frozen=True)
class UserModel(UserModule):
    """The module of a custom model."""

    key: ClassVar[str] = "model.target"
    arrays: tuple[str, ...]
    """The value of ARRAYS."""
    inputs: tuple[str, ...]
    """The value of INPUTS."""
    padded: tuple[str, ...]
    """The value of PADDED; empty if it is not set."""
    has_batch_loss: bool = False
    """Whether `loss` returns the loss of a whole micro-batch (LOSS = "batch"), and not a sum over samples."""

    @property
    def has_training_step(self) -> bool:
        """Whether the module runs each step itself."""
        return "training_step" in self.names

    @property
    def has_dataset(self) -> bool:
        """Whether the module has a function `dataset`, so that its samples are not read from HDF5 files."""
        return "dataset" in self.names

    @property
    def has_lengths(self) -> bool:
        """Whether ARRAYS contains `lengths`, because samples differ in length."""
        return LENGTHS_ARRAY in self.arrays


def find_user_model(target: str, folders: Sequence[Path]) -> UserModel:
    """Find the custom model `target` in `folders`, then on the Python path, without importing it.

    Raises UserError if the module does not exist, has the name of a module of the standard library, is not Python
    source, or lacks a required name.
    """
    return _parse_model(target, *_find_module(UserModel.key, target, folders, _HELP))


def find_callback_module(target: str, folders: Sequence[Path]) -> UserModule:
    """Find a module of `train.callbacks`, as `find_user_model` finds a custom model.

    Raises UserError if there is no such module with a function `callbacks`.
    """
    root, file = _find_module(UserModule.key, target, folders, _CALLBACKS_HELP)
    names = frozenset(_parse_names(UserModule.key, file))
    if "callbacks" not in names:
        message = f"{UserModule.key}: {file} lacks a function callbacks at its top level. {_CALLBACKS_HELP}"
        raise UserError("model.incomplete_module", message)
    return UserModule(target, root, names)


def _find_module(key: str, target: str, folders: Sequence[Path], help_text: str) -> tuple[Path, Path]:
    """Return the top-level package or module of a module, and the file of the module.

    Args:
        key: the config key that names the module.
        target: the dotted name of the module.
        folders: where the module is searched before the Python path.
        help_text: the last sentence of messages.

    Raises:
        UserError: if there is no such module.
    """
    top_name, *inner_names = target.split(".")
    folder_names = [str(folder) for folder in folders]
    spec = PathFinder.find_spec(top_name, folder_names) or importlib.util.find_spec(top_name)
    if spec is None or top_name in sys.stdlib_module_names:
        raise UserError(
            "model.no_module",
            f"{key}: there is no module {top_name} in {', '.join(folder_names)}, PYTHONPATH and the installed "
            f"packages: run the command in the folder that contains it, or add that folder to PYTHONPATH. {help_text}",
        )
    package_folders = list(spec.submodule_search_locations or ())
    root = Path(package_folders[0]) if package_folders else Path(spec.origin or "")
    file = root.joinpath(*inner_names)
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    if not file.is_file() or (inner_names and not package_folders):
        message = f"{key}: {target} has no Python source: there is no {file}. {help_text}"
        raise UserError("model.no_module", message)
    return root, file


def _parse_names(key: str, file: Path) -> dict[str, ast.expr | None]:
    """Return the top-level names of a file with the expressions that are assigned to them.

    The expression of a function, a class or an import is None.

    Args:
        key: the config key that names the module, for messages.
        file: the file.

    Raises:
        UserError: if the file is not valid Python.
    """
    try:
        body = ast.parse(file.read_bytes(), str(file)).body
    except (SyntaxError, ValueError) as error:
        raise UserError(
            "model.invalid_module", f"{key}: {file} is not valid for Python {sys.version.split()[0]}: {error}"
        ) from error
    names: dict[str, ast.expr | None] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names[node.name] = None
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name: None for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for assigned in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(assigned, ast.Name):
                    names[assigned.id] = node.value
    return names


def _parse_model(target: str, root: Path, file: Path) -> UserModel:
    """Return the description of a custom model from its source. Raises UserError if it is invalid or incomplete."""
    names = _parse_names(UserModel.key, file)
    for flag in ("CUTS", "ELEMENTWISE"):
        if isinstance(value := names.get(flag), ast.Constant) and not value.value:
            del names[flag]

    def read_tuple(name: str) -> tuple[str, ...]:
        """Return the tuple or list that is assigned to a top-level name, as a tuple.

        The result is empty if the name is not set, or is only imported.
        """
        try:
            value = ast.literal_eval(names.get(name) or ast.Tuple([], ast.Load()))
        except ValueError:
            value = None
        if not isinstance(value, tuple | list) or not all(isinstance(entry, str) for entry in value):
            raise UserError(
                "model.invalid_module",
                f'model.target: {name} in {file} is not a plain tuple of names such as ("images", "labels")',
            )
        return tuple(value)

    loss_kind = names.get("LOSS", ast.Constant("sum"))
    if not isinstance(loss_kind, ast.Constant) or loss_kind.value not in ("sum", "batch"):
        raise UserError(
            "model.invalid_module",
            f'model.target: LOSS in {file} must be "sum" or "batch", written as a plain string. {_HELP}',
        )
    missing = [name for name in ("ARRAYS", "INPUTS", "build", "loss") if name not in names]
    if missing:
        raise UserError(
            "model.incomplete_module", f"model.target: {file} lacks {', '.join(missing)} at its top level. {_HELP}"
        )
    arrays, inputs, padded = map(read_tuple, ("ARRAYS", "INPUTS", "PADDED"))
    has_batch_loss = loss_kind.value == "batch"
    model = UserModel(target, root, frozenset(names), arrays, inputs, padded, has_batch_loss)
    unknown = [name for name in (*model.inputs, *model.padded) if name not in model.arrays]
    if model.padded and not model.has_lengths:
        unknown.append(LENGTHS_ARRAY)
    if unknown:
        problem = f"{unknown[0]} of {file} is not among its ARRAYS {model.arrays}"
        raise UserError("model.invalid_module", f"model.target: {problem}. {_HELP}")
    if not model.inputs:
        problem = f"INPUTS of {file} is empty: name at least one of its ARRAYS {model.arrays}"
        raise UserError("model.invalid_module", f"model.target: {problem}. {_HELP}")
    return model


def check_user_model(config: Config, model: UserModel) -> None:
    """Raise UserError if the config has options that the module does not support, or that need missing functions.

    The message names each option and the function that it needs.
    """
    problem = (
        _describe_gather_problem(config, model)
        or _describe_step_problem(config, model)
        or _describe_optimizer_problem(config, model)
    )
    if problem is not None:
        raise UserError("config.conflict", problem)
    parallel = config.parallel
    train = config.train
    checkpointing = parallel.activation_checkpointing
    requirements = [
        (parallel.tensor > 1, f"parallel.tensor {parallel.tensor}", "tensor_plan"),
        (parallel.pipeline > 1, f"parallel.pipeline {parallel.pipeline}", "CUTS"),
        (checkpointing != "none", f"parallel.activation_checkpointing {checkpointing}", "blocks"),
        (train.compile, "train.compile", "blocks"),
        (train.precision == "fp8", "train.precision fp8", "blocks"),
        (config.optimizer.name == "muon", "optimizer.name muon", "blocks"),
        (config.optimizer.name == "own", "optimizer.name own", "optimizer"),
        (config.optimizer.schedule == "own", "optimizer.schedule own", "learning_rate"),
    ]
    problems = [
        f"{option} needs {'CUTS = True, and a build that returns parts' if name == 'CUTS' else f'a function {name}'}"
        for is_used, option, name in requirements
        if is_used and name not in model.names
    ]
    if problems:
        raise UserError(
            "model.incomplete_module",
            f"{'; '.join(problems)}: {model.target} has none. Add it ({_HELP}), or remove the option. Data parallelism "
            "with parallel.zero 0 to 3 needs no such function",
        )
    _check_data_config(config.data, model)


def _check_data_config(data: DataConfig, model: UserModel) -> None:
    """Raise UserError if the section `data` does not fit a module with or without a function `dataset`."""
    defaults = DataConfig()
    if not model.has_dataset:
        if data.sources == defaults.sources:
            raise UserError(
                "config.conflict",
                "model.target: set data.source to the HDF5 files that contain the samples, or define a function "
                f"`dataset` in {model.target} ({_HELP})",
            )
        if data.workers != defaults.workers:
            raise UserError(
                "config.conflict",
                f"data.workers ({data.workers}) is for a function `dataset`, but {model.target} has none: remove it",
            )
        return
    if model.has_lengths:
        raise UserError(
            "model.invalid_module",
            f"model.target: {model.target} has a function `dataset`, which cannot be combined with samples of "
            f"different length: remove {LENGTHS_ARRAY} from ARRAYS, or read the samples from HDF5 files",
        )
    if data.held_out not in (0, defaults.held_out):
        raise UserError(
            "config.conflict",
            f"data.held_out ({data.held_out}) cannot be a fraction, because {model.target} has a function `dataset`, "
            'which returns the held-out samples for the split "held_out": remove the key, or set it to 0 if there are '
            "none",
        )


def _describe_step_problem(config: Config, model: UserModel) -> str | None:
    """Return why the module's `training_step` cannot be used with this config; None if it can, or there is none."""
    if not model.has_training_step:
        return None
    parallel = config.parallel
    used = {
        f"parallel.tensor {parallel.tensor}": parallel.tensor > 1,
        f"parallel.pipeline {parallel.pipeline}": parallel.pipeline > 1,
        "parallel.local_sgd": parallel.local_sgd is not None,
        f"parallel.hook.kind {parallel.hook.kind}": parallel.hook.kind != "none",
        "parallel.offload": parallel.offload,
        "train.gather": config.train.gather,
    }
    keys = ", ".join(key for key, is_used in used.items() if is_used)
    if not keys:
        return None
    return (
        f"the training_step of {model.target} runs with DDP and ZeRO only: remove {keys}, or remove training_step from "
        "the module"
    )


def _describe_optimizer_problem(config: Config, model: UserModel) -> str | None:
    """Return why the layout cannot be used with the module's optimizer; None if it can."""
    if config.optimizer.name != "own" or "ELEMENTWISE" in model.names:
        return None
    parallel = config.parallel
    sizes = {"zero": parallel.zero, "tensor": parallel.tensor - 1, "pipeline": parallel.pipeline - 1}
    keys = ", ".join(f"parallel.{key}" for key, size in sizes.items() if size)
    if not keys:
        return None
    return (
        f"optimizer.name own cannot be combined with {keys}, which split parameters. If the optimizer of "
        f"{model.target} updates each entry independently of all others, as Adam does, set ELEMENTWISE = True in the "
        "module. Otherwise, remove these keys"
    )


def _describe_gather_problem(config: Config, model: UserModel) -> str | None:
    """Return why `train.gather` cannot be used with this config and model; None if it can, or is not set."""
    if not config.train.gather:
        return None
    parallel = config.parallel
    if not model.has_batch_loss:
        return f'train.gather needs LOSS = "batch" in {model.target}, because other losses are sums over samples'
    if model.padded:
        return f"train.gather cannot be combined with PADDED in {model.target}: samples of all ranks need one shape"
    if parallel.tensor > 1 or parallel.local_sgd is not None:
        key = "parallel.local_sgd" if parallel.local_sgd is not None else f"parallel.tensor {parallel.tensor}"
        return f"train.gather cannot be combined with {key}: remove one of them"
    return None


def resolve_user_model(config: Config, folders: Sequence[Path]) -> UserModel | None:
    """Return the custom model of a config after checking it; None if the config trains the built-in decoder.

    Raises UserError as :func:`find_user_model` and :func:`check_user_model` do.
    """
    if config.model.target is None:
        return None
    model = find_user_model(config.model.target, folders)
    check_user_model(config, model)
    return model


def resolve_callback_modules(config: Config, folders: Sequence[Path]) -> list[UserModule]:
    """Return the modules of `train.callbacks`. Raises UserError as :func:`find_callback_module` does."""
    return [find_callback_module(target, folders) for target in config.train.callbacks]


def resolve_user_modules(config: Config, folders: Sequence[Path]) -> list[UserModule]:
    """Return all modules of the user that a config names: the custom model, and those of `train.callbacks`.

    Raises UserError if one of them cannot be used, or if two files or folders in different places have the same name,
    because the run has a copy of each.
    """
    model = resolve_user_model(config, folders)
    modules = [*([] if model is None else [model]), *resolve_callback_modules(config, folders)]
    roots: dict[str, Path] = {}
    for module in modules:
        if (other := roots.setdefault(module.root.name, module.root)) != module.root:
            raise UserError(
                "model.reserved_name", f"{module.key}: {module.root} has the same name as {other}: rename one of them"
            )
    return modules
