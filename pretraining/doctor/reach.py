"""Check names, networks and hubs: can ranks reach this machine, and can (and may) it reach what a run needs?

Ranks among each other: cluster.py, and how fast: rates.py.
"""

import calendar
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from email.utils import parsedate
from fnmatch import fnmatch
from functools import partial
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

from pretraining.data.prepared import open_prepared
from pretraining.data.text_files import list_files
from pretraining.doctor.findings import BREAKS, COSTS, FINE, Finding
from pretraining.doctor.launch import Launch, trackers_of
from pretraining.errors import UserError, reason_of, require
from pretraining.outside.addresses import hub_repository, is_remote
from pretraining.outside.masking import masked
from pretraining.outside.store import PATIENCE_VARIABLE
from pretraining.planning.quantities import several
from pretraining.recipe.data import TextOrigin
from pretraining.runtime import host

SLOWING = {
    "NCCL_P2P_DISABLE": ("1", "GPUs copy through the processor"),
    "NCCL_SHM_DISABLE": ("1", "ranks of one machine talk through the network"),
    "NCCL_IB_DISABLE": ("1", "InfiniBand is left out"),
    "NCCL_DEBUG": ("TRACE", "every call is logged"),
    "CUDA_LAUNCH_BLOCKING": ("1", "every kernel is waited for"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "the processor waits for every message"),
    "NCCL_BLOCKING_WAIT": ("1", "the processor waits for every message"),
}
"""{variable: (the value that slows a run down, how it does)}"""
UNREAD = "TORCH_NCCL_AVOID_RECORD_STREAMS"
"""In many scripts, for an earlier torch; 2.15 has `TensorShelf` (ProcessGroupNCCL.hpp) in its place."""
SECONDS = 3.0
"""Limit of all answers together, because all questions are asked at the same time."""
HUB = "https://huggingface.co"
SKEWED_SECONDS = 60
"""From here on times in events.jsonl and in a tracker are wrong; from REFUSED_SECONDS on S3 refuses requests."""
REFUSED_SECONDS = 900
Question = tuple[str, str]
"""(name of a check, what is to be reached); the same question is asked only once."""


def _own_name(launch: Launch) -> Finding:
    """Check the address of the machine's own name, on which gloo listens."""
    name, address = socket.gethostname(), host.own_address()
    chosen = os.environ.get(host.GLOO_INTERFACE)
    what = (
        f"{name} leads to no address of this machine" if address is None else f"{name} resolves to {address}"
    )
    if host.loopback_name() is None:  # the same judgement as that of `join_ranks`, which refuses
        what = f"{what}; GLOO_SOCKET_IFNAME is {chosen}" if chosen else f"{name} is {address}"
        return Finding("host name", FINE, what, values={"address": address})
    what += "" if address is None else ", this machine itself"
    if not launch.several_machines:
        return Finding("host name", FINE, f"{what}: enough for a run on one machine")
    elsewhere = several(launch.world_size - launch.ranks_here, "rank")
    what += f", and {elsewhere} elsewhere could not reach gloo there"
    interface = _outward_interface() or "INTERFACE"
    remedy = f"export GLOO_SOCKET_IFNAME={interface} on every machine, or give {name} its address in "
    return Finding("host name", BREAKS, what, f"{remedy}/etc/hosts")


def _outward_interface() -> str | None:
    """Return the interface that the default route takes."""
    # the kernel's table: interface, destination, ...; a destination of zeros is the default route
    routes = [line.split() for line in host.system_text(Path("/proc/net/route")).splitlines()[1:]]
    return next((route[0] for route in routes if len(route) > 1 and route[1] == "00000000"), None)


def check_names(launch: Launch) -> Iterator[Finding]:
    """Check the host's own name, variables that name what does not exist or slow messages down, and proxies."""
    yield _own_name(launch)
    present = [name for _, name in socket.if_nameindex()]
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        chosen = os.environ.get(variable, "")
        if not chosen or chosen.startswith("^"):  # "^docker" names what must not be taken
            continue
        # `eth` is how a name begins, `=eth0` a whole name; several are separated by commas
        parts = [part.partition(":")[0] for part in chosen.split(",") if part]
        names, beginnings = [part[1:] for part in parts if part.startswith("=")], tuple(parts)
        if not any(name in names or name.startswith(beginnings) for name in present):
            choice = _outward_interface() or next((name for name in present if name != "lo"), "lo")
            remedy = f"export {variable}={choice} (there are {', '.join(present)}), or unset {variable}"
            what = f"{variable} is {chosen}, and there is no such interface"
            yield Finding("network", BREAKS, what, remedy)
    for variable, (value, why) in SLOWING.items():
        if os.environ.get(variable, "").upper() == value:
            yield Finding("network", COSTS, f"{variable}={os.environ[variable]}: {why}", f"unset {variable}")
    if UNREAD in os.environ:
        why = "torch 2.15 always holds what a collective uses until it is waited for"
        yield Finding("network", FINE, f"{UNREAD} changes nothing: {why}")
    if meeting := os.environ.get("MASTER_ADDR"):
        try:
            socket.gethostbyname(meeting)
        except OSError:
            what = f"MASTER_ADDR is {meeting}, a name that has no address here"
            remedy = "give it an address in /etc/hosts, or the launcher --master_addr=ADDRESS"
            yield Finding("network", BREAKS, what, remedy)
    # stores of this machine or network that would be asked through a proxy for outside addresses
    if not any(os.environ.get(variable) for variable in ("https_proxy", "HTTPS_PROXY", "http_proxy")):
        return
    # As requests and urllib read it: a name of the list spares all that ends with it.
    without = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(",")
    endings = [entry.strip() for entry in without if entry]
    for variable in ("HF_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        server = urlsplit(os.environ.get(variable, "")).hostname
        if not server or any(fnmatch(server, f"*{ending}") for ending in endings):
            continue
        try:
            is_local = ipaddress.ip_address(server).is_private
        except ValueError:
            is_local = "." not in server  # a name without a domain is one of this network
        if is_local:
            what = f"{variable} is {server}, a local address, and a proxy is set for all addresses"
            remedy = f"export no_proxy={','.join(filter(None, [*without, server]))}"
            yield Finding("proxy", COSTS, what, remedy)
            return  # one remedy spares this host; the next start names another


def ask_all(questions: dict[Question, Callable[[], Finding]]) -> Callable[[], list[Finding]]:
    """Ask the questions at the same time, each in a thread; return what waits for their answers, at most SECONDS.

    It returns the findings in the order of the questions; an answer that is late becomes a finding that breaks.
    """
    answers: dict[Question, Finding | Exception] = {}
    deadline = time.monotonic() + SECONDS

    def answer(question: Question) -> None:
        try:
            answers[question] = questions[question]()
        except UserError as error:
            answers[question] = Finding.of_error(question[0], error)
        except Exception as error:  # a fault of ours, which a thread would keep to itself
            answers[question] = error

    # daemons: one that hangs keeps nobody from leaving
    threads = {each: threading.Thread(target=answer, args=(each,), daemon=True) for each in questions}
    for thread in threads.values():
        thread.start()

    def findings() -> list[Finding]:
        found = []
        for (check, subject), thread in threads.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            what = f"{subject}: no answer within {SECONDS:.0f} s"
            answer = answers.get((check, subject)) or Finding(check, BREAKS, what, _offline_remedy(check))
            if isinstance(answer, Exception):
                raise answer
            found.append(answer)
        return found

    return findings


def questions_of(launch: Launch) -> dict[Question, Callable[[], Finding]]:
    """List the questions, each once, with the function that answers it."""
    recipe = launch.recipe
    if recipe is None:
        return {}
    questions: dict[Question, Callable[[], Finding]] = {("data", "prepared data"): partial(_prepared, launch)}
    if not launch.data_is_prepared:
        for _, source in recipe.data.text_origins:
            subject, ask = _of_source(source)
            questions["data", subject] = ask
        if isinstance(tokenizer := recipe.data.tokenizer, str):
            questions["tokenizer", tokenizer] = partial(_tokenizer, tokenizer)
    # Needed by the run itself, prepared data or not.
    if (scored := recipe.evaluation.hellaswag) and not Path(scored).is_file():
        questions["evaluation", scored] = partial(_repository, "evaluation", "dataset", scored)
    if address := recipe.checkpoints.upload:
        questions["upload", address] = partial(_upload, address)
    # Without a key wandb keeps its rows offline, and asks nobody.
    if "wandb" in trackers_of(recipe) and os.environ.get("WANDB_API_KEY"):
        questions["tracker", "wandb"] = _wandb
    return questions


def _of_source(source: TextOrigin) -> tuple[str, Callable[[], Finding]]:
    # The repository is the subject: it is asked about once, also if several of its folders are sources.
    name, path = source.dataset, source.path
    if name and not Path(name).exists():
        return name, partial(_repository, "data", "dataset", name)
    if path and (repository := hub_repository(path)):
        *kinds, owner, title = repository.split("/")
        kind = kinds[0].removesuffix("s") if kinds else "model"
        return f"{owner}/{title}", partial(_repository, "data", kind, f"{owner}/{title}")

    def count_files() -> Finding:  # of this machine, or of a store that fsspec reaches
        here = f"{name or source.called}: on this machine"
        return Finding("data", FINE, f"{path}: {len(list_files(path)):,} files" if path is not None else here)

    return name or path or source.called, count_files


def _prepared(launch: Launch) -> Finding:
    """Open prepared data as a run opens it; its sources are then not needed."""
    os.environ.setdefault(PATIENCE_VARIABLE, str(SECONDS - 1))  # then the store's own reason comes in time
    try:
        data = open_prepared(launch.recipe, launch.data_dir)
    except UserError as error:
        return Finding.of_error("data", error)
    except OSError as error:  # its folder is closed to us
        what = f"{launch.data_folder} cannot be read ({error.strerror})"
        return Finding("data", BREAKS, what, "give --data_dir another folder, or have it allowed to you")
    what = f"prepared: {data.train.num_tokens:,} training tokens in {launch.data_folder or launch.data_dir}"
    return Finding("data", FINE, what)


def _tokenizer(name: str) -> Finding:
    """Check a tokenizer: a folder, a repository of the hub in the cache, or one that is still to be fetched."""
    folder = Path(name).expanduser()
    if (folder / "tokenizer.json").is_file():
        return Finding("tokenizer", FINE, f"{name}: a folder of this machine")
    if name.startswith((".", "/", "~")):
        remedy = "--set data.tokenizer=NAME, of the hub or of a folder with a tokenizer.json"
        return Finding("tokenizer", BREAKS, f"{name}: no tokenizer.json there", remedy)
    hub = require("huggingface_hub", f"the tokenizer {name!r}")
    if isinstance(hub.try_to_load_from_cache(name, "tokenizer.json"), str):
        return Finding("tokenizer", FINE, f"{name}: fetched already")
    return _repository("tokenizer", "model", name)


def _repository(check: str, kind: str, name: str) -> Finding:
    """Check whether the hub lets this account read a repository. kind: "model" or "dataset"."""
    hub = require("huggingface_hub", f"{kind} {name!r}")
    endpoint = os.environ.get("HF_ENDPOINT", HUB).rstrip("/")
    page = f"{endpoint}/{'datasets/' * (kind == 'dataset')}{name}"
    if hub.is_offline_mode():
        remedy = "unset HF_HUB_OFFLINE, or export HF_HOME=FOLDER, the cache that holds it"
        what = f"{name}: not fetched yet, and HF_HUB_OFFLINE forbids asking the hub"
        return Finding(check, BREAKS, what, remedy)
    cache = host.existing_folder(Path(os.environ.get("HF_HOME") or "~/.cache/huggingface"))
    if broken := host.unwritable(cache):
        what = f"{name}: what is fetched cannot be kept in {cache} ({broken})"
        return Finding(check, BREAKS, what, "export HF_HOME=FOLDER, one that can be written")
    token = hub.get_token()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    # what `HfApi.auth_check` asks, within a time of our own
    question = Request(f"{endpoint}/api/{kind}s/{quote(name)}/auth-check", headers=headers)
    try:
        with urlopen(question, timeout=SECONDS) as answer:
            skewed = check_clock(answer.headers.get("date"))
    except HTTPError as error:
        return _refused(check, name, page, bool(token), error)
    except (OSError, HTTPException) as error:
        what = f"{name}: {endpoint} cannot be reached ({_reason(error)})"
        return Finding(check, BREAKS, what, _offline_remedy(check))
    return skewed or Finding(check, FINE, f"{name}: {endpoint} lets us read it")


def _refused(check: str, name: str, page: str, has_token: bool, error: HTTPError) -> Finding:
    """Explain the hub's refusal (huggingface_hub 2.4, utils/_http.py: X-Error-Code)."""
    code = error.headers.get("X-Error-Code", "")
    whose = "to the account of your token" if has_token else "without a token"
    # first, because its status is 401 or 403 too
    if code == "GatedRepo":
        remedy = f"accept its terms at {page}"
        remedy += "" if has_token else ", then export HF_TOKEN=TOKEN, one of that account (or hf auth login)"
        return Finding(check, BREAKS, f"{name}: gated, and closed {whose} ({error.code})", remedy)
    if error.code in (401, 403):
        remedy = "export HF_TOKEN=TOKEN, one that may read it (or hf auth login)"
        return Finding(check, BREAKS, f"{name}: closed {whose} ({error.code})", remedy)
    if error.code == 404:
        what = f"{name}: the hub knows no such repository, or hides a private one"
        remedy = "check the name in the recipe, or export HF_TOKEN=TOKEN of an account that sees it"
        return Finding(check, BREAKS, what, remedy)
    what = f"{name}: the hub answers {error.code} ({error.reason})"
    return Finding(check, COSTS, what, "try again later; HF_ENDPOINT may name a mirror")


def check_clock(date: str | None) -> Finding | None:
    """Compare this clock with the date of a server's answer; None if it is right, or the server does not say."""
    parsed = parsedate(date)
    ahead = time.time() - calendar.timegm(parsed) if parsed else 0.0
    if abs(ahead) < SKEWED_SECONDS:
        return None
    side = "ahead" if ahead > 0 else "behind"
    what = f"this machine's clock is {abs(ahead):.0f} s {side}: stores and certificates count on it"
    verdict = BREAKS if abs(ahead) >= REFUSED_SECONDS else COSTS
    return Finding("clock", verdict, what, "timedatectl set-ntp true (as root)")


def _upload(address: str) -> Finding:
    """Write a small file and remove it, as a run does at its start."""
    fsspec = require("fsspec", "checkpoints.upload")
    try:
        system, path = fsspec.core.url_to_fs(address)
        if repository := hub_repository(address):
            # read only: on the hub each write is a commit, which would stay
            system.ls(repository)
            what = f"{address}: can be read; whether it can be written, the run will try"
            return Finding("upload", FINE, what)
        if not is_remote(address):  # stores make folders by themselves
            system.makedirs(path, exist_ok=True)
        system.pipe_file(f"{path}/.writable", b"yes\n")
        with suppress(FileNotFoundError):  # another node tried at the same time, and was first
            system.rm_file(f"{path}/.writable")
    except Exception as error:  # every store has its own classes
        what = f"{address} cannot be written ({type(error).__name__}: {reason_of(error)})"
        remedy = "check the address and the variables that hold its credentials (AWS_ACCESS_KEY_ID and "
        return Finding("upload", BREAKS, what, f"{remedy}AWS_SECRET_ACCESS_KEY, HF_TOKEN, ...)")
    return Finding("upload", FINE, f"{address}: a file was written and removed")


def _wandb() -> Finding:
    """Check wandb's server; without it a run goes on and keeps what it logs."""
    server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    try:
        urlopen(Request(server, method="HEAD"), timeout=SECONDS).close()
    except HTTPError:
        pass  # it answers
    except OSError as error:
        what = f"wandb: {server} cannot be reached ({_reason(error)})"
        remedy = "export WANDB_MODE=offline, and `wandb sync` the run folder later"
        return Finding("tracker", COSTS, what, remedy)
    return Finding("tracker", FINE, f"wandb: {server} answers")


def _reason(error: Exception) -> str:
    """Say in a few words why a server did not answer."""
    reason = getattr(error, "reason", error)
    return masked(str(getattr(reason, "strerror", None) or reason))


def _offline_remedy(check: str) -> str:
    """Say what to do if the hub or a store does not answer."""
    ways = "export HF_ENDPOINT=ADDRESS of a mirror, or https_proxy=ADDRESS"
    if check in ("data", "tokenizer"):
        return f"{ways}, or prepare the data on another machine and copy it into --data_dir"
    return f"{ways}, or fetch it elsewhere and export HF_HOME=FOLDER HF_HUB_OFFLINE=1"
