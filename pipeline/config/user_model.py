"""A model of your own: what the Python module named by `model.target` offers, and how it is found.

    model: {target: my_package.my_model, options: {width: 64}, layers: 6}
    data:  {source: "/data/images-*.h5", held_out: 0.1}

The module says at its top level, in plain tuples of names (they are read without importing the module):

    ARRAYS = ("images", "labels")   a sample's arrays: HDF5 datasets with the samples along the first dimension
    INPUTS = ("images",)            those that the module's `forward` takes, in this order
    PADDED = ("words",)             optional: arrays whose second dimension is padded. `lengths` must be among ARRAYS:
                                    sample i has `lengths[i]` entries there. Batches are evened out by it over the
                                    ranks, and each micro-batch is cut to its longest sample (not under a pipeline)
    CUTS = True                     optional: `build` can give any part of the model (parallel.pipeline > 1)

and defines, or imports by name, these functions. A batch is a dict of tensors by the names of ARRAYS, of the files'
types, with the samples along the first dimension:

    build(options, layers) -> Module   the model with the blocks `layers`, a range: all of range(options["layers"]), the
                                       config's `model.layers`, and with CUTS a part of them. The part with block 0
                                       takes INPUTS, any other one what the part before it returned, one tensor. A
                                       block's parameters have the same names in any part
    loss(outputs, batch) -> Tensor     the *sum* of the loss over the samples; with `lengths`, over their entries, the
                                       padding masked out. Sums add up over micro-batches and ranks; training and
                                       evaluation divide by the global batch's number of samples, or of entries
                                       It is called with one sample, too, and no sample's loss may depend on the
                                       others (contrastive losses are not supported yet)
    metrics(outputs, batch) -> dict    optional: sums of the same kind by name, which evaluation adds to its result
    transform(sample, random) -> dict  optional: what the model gets of a sample, such as a random crop: arrays of the
                                       same names, in the same shapes and types for all samples. `sample`: those of
                                       the file (numpy, not to be written to); `random`: a numpy Generator that follows
                                       from seed and position in the run, so that a stop or another layout changes
                                       nothing; None for held-out samples. Called one by one in the reader's thread
    init(name, values, options)        optional: fills `values`, the whole parameter `name`, fp32 on the CPU, from
                                       torch's seeded generator; without it, matrices are normal with deviation
                                       `model.initializer_range`, vectors called `weight` are 1 and others 0
    blocks(model) -> list of Module    optional: what ZeRO gathers, recomputation repeats and compile compiles one by
                                       one, fp8 is for, and whose matrices Muon takes; without it ZeRO takes the whole
                                       model at once
    optimizer(parameters, config)      optional (optimizer.name: own): a torch optimizer over `parameters`, a list of
                                       (name, parameter); `config` has the keys of the section `optimizer`, such as
                                       `config.lr`. Its state must be tensors. The schedule scales the rates of its
                                       groups alike. Whole replicas (DDP) only
    learning_rate(config, step, steps) optional (optimizer.schedule: own): the rate of `step`, from 1 to `steps`; a
                                       function of these alone, or a run that is stopped becomes another one
    callbacks(config) -> list          optional: objects derived from `pipeline.train.callback.Callback`, with hooks
                                       that the trainer calls; `config` is the whole config (docs/models.md)
    tensor_plan(options) -> dict       optional (parallel.tensor > 1): a `parallelize_module` plan. It must name every
                                       module with parameters; `pipeline.tensor_parallel.Replicated()` leaves one whole

The model is built without memory and its parameters are filled by `init`, so `__init__` must not set values. A module
with (non-persistent) buffers has a method `reset_buffers()` that fills them. What depends on history or on the batch's
other samples would differ between layouts: persistent buffers, and with them BatchNorm, are refused.

**Where it is found**: working directory, PYTHONPATH, installed packages; the run's code gets a copy of its top-level
package, which the jobs import; of a single file, with what it imports from its own folder. Reading it here takes no
torch: the login node refuses what the module cannot do.
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

from pipeline.base.errors import UserError
from pipeline.config.sections import Config

SEE = "pipeline/config/user_model.py says what such a module offers"
LENGTHS_ARRAY = "lengths"
"""The array that says how long each sample is."""
UNREAD_OPTIONS = "model.options that no build reads: "
"""What precedes their names in the output of a process that builds a model on trial."""


@dataclass(frozen=True)
class UserModel:
    """What is known of a module without importing it."""

    target: str
    root: Path
    """Its top-level package (a folder) or module (a file)."""
    names: frozenset[str]
    """What it defines or imports at its top level."""
    arrays: tuple[str, ...]
    inputs: tuple[str, ...]
    padded: tuple[str, ...]

    @property
    def has_lengths(self) -> bool:
        """Whether samples differ in length."""
        return LENGTHS_ARRAY in self.arrays

    def load(self, code: Path) -> ModuleType:
        """Import it, from the run's `code`. Raises UserError where it, or what it imports, is not installed here."""
        if str(code) not in sys.path:
            sys.path.insert(0, str(code))
        try:
            module = importlib.import_module(self.target)
            if self.root not in Path(str(module.__file__)).parents and self.root != Path(str(module.__file__)):
                raise ImportError(f"{module.__file__} came first; rename {self.root.name}")
            return module
        except ImportError as error:
            raise UserError(
                "model.import_failed",
                f"model.target: {self.target} cannot be imported: {error}; install what it imports, or add the folder "
                "that holds it to PYTHONPATH (site.setup)",
            ) from error


def find_user_model(target: str, folders: Sequence[Path]) -> UserModel:
    """The module `target`, looked for in `folders`, then where Python itself looks; nothing is imported.

    Raises UserError where it is missing, is no Python source, or lacks what every such module has.
    """
    top, *rest = target.split(".")
    places = [str(folder) for folder in folders]
    spec = PathFinder.find_spec(top, places) or importlib.util.find_spec(top)
    if spec is None or top in sys.stdlib_module_names:
        raise UserError(
            "model.no_module",
            f"model.target: there is no module {top} (looked in {', '.join(places)}, PYTHONPATH and the installed "
            f"packages); start from the folder that holds it, or add that folder to PYTHONPATH. {SEE}",
        )
    inside = list(spec.submodule_search_locations or ())
    root = Path(inside[0]) if inside else Path(spec.origin or "")
    file = root.joinpath(*rest)
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    if not file.is_file() or (rest and not inside):
        raise UserError("model.no_module", f"model.target: {target} has no Python source: there is no {file}. {SEE}")
    return _read(target, root, file)


def _read(target: str, root: Path, file: Path) -> UserModel:
    try:
        body = ast.parse(file.read_bytes(), str(file)).body
    except (SyntaxError, ValueError) as error:
        raise UserError(
            "model.invalid_module", f"model.target: {file} is not valid for Python {sys.version.split()[0]}: {error}"
        ) from error
    names: dict[str, ast.expr | None] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names[node.name] = None
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name: None for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for name in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(name, ast.Name):
                    names[name.id] = node.value

    if isinstance(cuts := names.get("CUTS"), ast.Constant) and not cuts.value:
        del names["CUTS"]

    def tuple_of(name: str) -> tuple[str, ...]:
        try:
            found = ast.literal_eval(names.get(name) or ast.Tuple([], ast.Load()))
        except ValueError:
            found = None
        if not isinstance(found, tuple | list) or not all(isinstance(entry, str) for entry in found):
            raise UserError(
                "model.invalid_module",
                f'model.target: {name} in {file} is not a plain tuple of names such as ("images", "labels")',
            )
        return tuple(found)

    lacking = [name for name in ("ARRAYS", "INPUTS", "build", "loss") if name not in names]
    if lacking:
        raise UserError(
            "model.incomplete_module", f"model.target: {file} lacks {', '.join(lacking)} at its top level. {SEE}"
        )
    model = UserModel(target, root, frozenset(names), tuple_of("ARRAYS"), tuple_of("INPUTS"), tuple_of("PADDED"))
    unknown = [name for name in (*model.inputs, *model.padded) if name not in model.arrays]
    if unknown or not model.inputs or (model.padded and not model.has_lengths):
        what = unknown[0] if unknown else LENGTHS_ARRAY if model.padded else "INPUTS"
        raise UserError(
            "model.invalid_module", f"model.target: {what} of {file} is not among its ARRAYS {model.arrays}. {SEE}"
        )
    return model


def check_user_model(config: Config, model: UserModel) -> None:
    """Raise UserError where the config asks for what the module does not offer, naming both."""
    parallel, train, recomputed = config.parallel, config.train, config.parallel.activation_checkpointing
    needs = [
        (parallel.tensor > 1, f"parallel.tensor {parallel.tensor}", "tensor_plan"),
        (parallel.pipeline > 1, f"parallel.pipeline {parallel.pipeline}", "CUTS"),
        (recomputed != "none", f"parallel.activation_checkpointing {recomputed}", "blocks"),
        (train.compile, "train.compile", "blocks"),
        (train.precision == "fp8", "train.precision fp8", "blocks"),
        (config.optimizer.name == "muon", "optimizer.name muon", "blocks"),
        (config.optimizer.name == "own", "optimizer.name own", "optimizer"),
        (config.optimizer.schedule == "own", "optimizer.schedule own", "learning_rate"),
    ]
    lacks = [
        f"{option} needs {'CUTS = True, and a build that gives parts' if name == 'CUTS' else f'a function {name}'}"
        for wanted, option, name in needs
        if wanted and name not in model.names
    ]
    if lacks:
        raise UserError(
            "model.incomplete_module",
            f"{'; '.join(lacks)}: {model.target} has none. Add it ({SEE}), or leave the option out: data parallel with "
            "parallel.zero 0 to 3 needs nothing",
        )


def resolve_user_model(config: Config, folders: Sequence[Path]) -> UserModel | None:
    """The checked module of a config, None where it trains the decoder. Raises UserError as `find` and `check` do."""
    if config.model.target is None:
        return None
    model = find_user_model(config.model.target, folders)
    check_user_model(config, model)
    return model
