"""What tokens look like and how variables with secrets are named: recipes, scripts, environments and uploads must not hold one.

``launch/run.sbatch`` has a pattern of its own, for bash: what :func:`names_secret`
reports it takes out of the job's environment, and nothing that cannot be a secret's (:func:`may_name_secret`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|wandb_v1_\w{16,}|xox[abprs]-[A-Za-z0-9-]{10,}|AKIA[0-9A-Z]{16})|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
"""Hugging Face, OpenAI, GitHub, GitLab, W&B, Slack, AWS, private keys. Real ones have 20 characters and more behind the prefix:
16 leaves room for a token that was cut, and no name of a model or a dataset is taken for one."""

_NAME = re.compile(
    r"TOKEN|KEY|SECRET|PASS(W|PHRASE)|CREDENTIAL|COOKIE|JWT|NETRC|SESSION(_ID)?$|AUTH(?!OR)|PRIVATE|SIGNATURE", re.IGNORECASE
)
_SURE = re.compile(r"(?:^|_)(?:TOKEN|API_?KEY|ACCESS_?KEY|SECRET|SECRET_KEY|PASSWORD|PASSWD)$", re.IGNORECASE)
_OF_TEXT = re.compile(r"^(?:PAD|EOS|BOS|SEP|CLS|MASK|UNK|STOP|START|END|SPECIAL|IMAGE|EXTRA|NEXT|MAX|MIN|NUM)_", re.IGNORECASE)
"""Tokens of a tokenizer."""
_PART = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_?KEY)(_|$)")
_SETTING = re.compile(r"(?im)(?<![a-z_])([a-z_]*(?:pass|secret|jwt_key)[a-z_]*(?:[ \t]*=|[ \t])(?:[ \t]|\\\r?\n)*)([^\s\\].*)$")
"""A secret setting of Slurm's files: in a comment too, behind another one, in the next line, or without its sign."""
_IN_ADDRESS = re.compile(r"(?<=://)[^\s/@:]*:[^\s/@]+(?=@)")


_RELEVANT = re.compile(
    r"(SLURM|SRUN|SBATCH|NCCL|GLOO|UCX|UCC|FI|OMPI|PMI|PMIX|TORCH|TORCHINDUCTOR|PYTORCH|CUDA|NVIDIA|HF|HUGGINGFACE|TRANSFORMERS"
    r"|DATASETS|TRITON|OMP|MKL|KMP|GOMP|OPENBLAS|APPTAINER|SINGULARITY|ENROOT|ACCELERATE|FSDP|WANDB|NLTK|LD|XDG|MASTER)_\w+"
    r"|PYTHON\w+|(?i:(https?|all|no|ftp)_proxy)|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|ROLE_RANK"
    r"|TMPDIR|HOME|VIRTUAL_ENV|CONDA_PREFIX|CONDA_DEFAULT_ENV|LC_ALL|LANG"
)
"""Names that steer Slurm, the frameworks, caches and proxies."""
_KEY_IN_HEX = re.compile(r"\b[0-9a-f]{40}\b|\beyJ[A-Za-z0-9_.\-]{12,}")
"""A key of W&B, or a signed web token: in a recipe 40 hex digits are a commit."""
_LOGIN_IN_URL = re.compile(r"(?<=://)[^/\s]*@")
_LONGEST = 4096


def mask(text: str) -> str:
    """``text`` with what has the form of a token, and with user and password of an address, left out."""
    return _IN_ADDRESS.sub("***", TOKEN.sub("(a token, not shown)", text))


def mask_settings(text: str) -> str:
    """``text`` of a file of Slurm's form with the values of passwords and keys left out."""
    return _SETTING.sub(r"\1(hidden)", text)


def holds_secret(value: object) -> bool:
    """Whether a text holds what has the form of a token."""
    return isinstance(value, str) and bool(TOKEN.search(value))


def may_name_secret(name: str) -> bool:
    """Whether a name may be a secret's: its value is not shown, whatever it is."""
    return bool(_NAME.search(name))


def names_secret(name: str) -> bool:
    """Whether a variable's name says that it holds a secret: it is reported."""
    return bool(_SURE.search(name)) and not _OF_TEXT.search(name)


def speaks_of_secret(name: str) -> bool:
    """Whether a variable has to do with a secret, such as a file that holds one: files that all can read must not name it."""
    return bool(_PART.search(name))


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that rules read. What looks like a secret is left out, by its name or by its value."""
    values = {}
    for name, value in sorted(environ.items()):
        if not _RELEVANT.fullmatch(name) or may_name_secret(name) or holds_secret(value) or _KEY_IN_HEX.search(value):
            continue
        values[name] = _LOGIN_IN_URL.sub("***@", value[:_LONGEST])
    return values


def has_login(text: str) -> bool:
    """Whether a URL held a name or password, which :func:`environment` has taken out."""
    return "://***@" in text
