"""Which formats of tokens there are: a row and a file for each; the first whose mark is found is taken.

Megatron      NAME.bin with NAME.idx                        mapped where they lie
llm.c         .bin with a header                            mapped
HDF5          `tokens` or `input_ids`                       mapped where contiguous
datatrove     NAME.ds with .ds.index, .ds.metadata          mapped
Arrow         lists in `input_ids`: Hugging Face's          copied (`data import`)
WebDataset    .npy in a tar                                 copied
nanoGPT       .bin of bare uint16                           mapped
"""

from __future__ import annotations

from data_prep.inputs.content import advice, seems
from data_prep.tokens import arrow, datatrove, hdf5_tokens, llm_c, megatron, raw_tokens, web_tar
from data_prep.tokens.token_file import TokenFile, head_of
from pipeline.base.command import command
from pipeline.base.errors import UserError
from pipeline.base.files import reading

FORMATS = (megatron, llm_c, hdf5_tokens, datatrove, arrow, web_tar, raw_tokens)
"""Each has `fits(path, head)`, whether a file with these first 512 bytes is of it, and `look(path)`, what is in it by
its header."""


def look(path: str, check: bool = True) -> TokenFile:
    """What a file holds. Raises UserError, naming it, where it is of no format, or damaged.

    check: whether an index of its documents is read through for that.
    """
    with reading(path):
        head = head_of(path, 512)
        if not head:
            raise UserError(f"{path} is missing or empty")
        for known in FORMATS:
            if known.fits(path, head):
                found = known.look(path)
                if check and found.ends is not None:
                    found.ends.check()
                return found
    found = seems(path)
    raise UserError(
        f"{path} is no file of tokens that is known (docs/data.md has the formats); it seems to be {found}"
        f"{advice(found.kind)}"
    )


def mappable(path: str, check: bool = True) -> TokenFile:
    """The same of a file that a run takes where it lies. Raises UserError with the way out for another one."""
    found = look(path, check)
    if found.why_not:
        words = command("data", "import", path, "--to", "DIR", "--tokenizer", "FILE")
        raise UserError(f"{path}: tokens cannot be mapped, for {found.why_not}: copy them, `{words}`")
    return found


def look_at(*paths: str) -> None:
    """Raise UserError where a run cannot take one of the files where it lies, at first sight."""
    for path in paths:
        mappable(path, check=False)
