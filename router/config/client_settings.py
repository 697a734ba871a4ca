"""What clients may send: requests, their limits, and keys."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import field_validator

from router.access.key_files import KeySource, read_key
from router.config.setting import DAY_S, IF_GIVEN, MOMENT_S, SettingGroup, Words, read_by, setting
from router.core.request_limits import DEFAULT_LIMITS
from router.http.port import HttpLimits
from router.proxy.model_tokenizer import ModelTokenizer, tokenizer_of

_DEFAULTS = HttpLimits()
_KeyFile = Annotated[str | None, read_by(KeySource)]


def _tokenizer(entry: str) -> ModelTokenizer:
    return tokenizer_of(entry.rpartition("=")[2])


class RequestSettings(SettingGroup):
    """Requests: model names, limits of each request, and extra answer headers."""

    model_alias: Words = setting(
        (), "A further name of a model, may be repeated.", metavar="NAME=MODEL"
    )
    tokenizer: Annotated[Words, read_by(_tokenizer)] = setting(
        (),
        "Folder of the model, with its tokenizer.json and chat template: prompts of text are made "
        "token ids as engines make them. With MODEL= for one model only; may be repeated.",
        metavar="[MODEL=]FOLDER",
        advanced=True,
    )
    worker_headers: bool = setting(
        False,
        "Whether answers name their worker (x-evenstep-worker) and their requests' seconds in the "
        "pool (x-evenstep-pool-wait-s).",
        live=True,
    )
    client_ranks: bool = setting(
        False,
        "Whether a client's X-Data-Parallel-Rank chooses the rank that serves its request, as in "
        "vLLM; other requests go where the policy says.",
        live=True,
    )
    max_slots: int = setting(
        DEFAULT_LIMITS.max_slots,
        "Answers that one request may ask for: its prompts times n; more: 400.",
        between=(1, 65_536),
    )
    max_messages: int = setting(
        DEFAULT_LIMITS.max_messages,
        "Messages of a chat and their parts together; more: 400.",
        between=(1, 65_536),
    )

    @property
    def aliases(self) -> Mapping[str, str]:
        return dict(_split(entry) for entry in self.model_alias)

    @property
    def tokenizers(self) -> Mapping[str, str]:
        """Folders by model; by an empty name for all others."""
        return {
            model: folder for model, _, folder in (one.rpartition("=") for one in self.tokenizer)
        }

    @field_validator("model_alias")
    @classmethod
    def _usable_aliases(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        pairs = [_split(entry) for entry in value]
        names = [name for name, _ in pairs]
        for name, model in pairs:
            if not name or not model:
                raise ValueError(
                    f"model alias {'='.join((name, model))!r} should be NAME=MODEL, as in "
                    "chat=meta-llama/Llama-3.1-8B"
                )
            if names.count(name) > 1:
                raise ValueError(f"model alias {name!r} is given twice: leave one of them out")
            if model in names:
                raise ValueError(
                    f"model alias {name!r} leads to {model!r}, an alias too: name the model itself"
                )
        return value


def _split(entry: str) -> tuple[str, str]:
    name, _, model = entry.partition("=")
    return name, model


class LimitSettings(SettingGroup):
    """Limits: size and time limits of clients' requests."""

    max_connections: int = setting(
        _DEFAULTS.max_connections,
        "Open connections of clients; a further one: 503, then closed.",
        between=(1, 1_000_000),
    )
    max_uri_bytes: int = setting(
        _DEFAULTS.max_uri_bytes, "Longest path with query; longer: 414.", between=(256, 1_048_576)
    )
    max_header_bytes: int = setting(
        _DEFAULTS.max_header_bytes,
        "Longest request line with header fields; longer: 431.",
        between=(1024, 1_048_576),
    )
    max_headers: int = setting(
        _DEFAULTS.max_headers, "Header fields of a request; more: 431.", between=(8, 10_000)
    )
    max_body_bytes: int = setting(
        _DEFAULTS.max_body_bytes, "Longest body of a request; longer: 413.", between=(1024, 2**30)
    )
    max_bodies_bytes: int = setting(
        _DEFAULTS.max_bodies_bytes,
        "Bodies of all open requests together; more: 503.",
        between=(1024, 2**40),
    )
    header_timeout_s: float = setting(
        _DEFAULTS.header_timeout_s,
        "Longest wait for the end of a request's header fields; then 408.",
        between=(MOMENT_S, DAY_S),
    )
    body_timeout_s: float = setting(
        _DEFAULTS.body_timeout_s,
        "Longest wait for the end of a request's body; then 408.",
        between=(MOMENT_S, DAY_S),
    )
    keep_alive_timeout_s: float = setting(
        _DEFAULTS.keep_alive_timeout_s,
        "How long a connection stays open between two requests.",
        between=(MOMENT_S, DAY_S),
    )
    write_timeout_s: float = setting(
        _DEFAULTS.write_timeout_s,
        "Longest wait for a client that reads nothing of its answer.",
        between=(MOMENT_S, DAY_S),
    )


class AccessSettings(SettingGroup):
    """Access: keys of clients, engines and operators."""

    api_key_file: _KeyFile = setting(
        None,
        "File with the clients' API keys, a line each: NAME KEY [weight=W] [concurrency=N] "
        "[rate=N/s] [ttft_ms=N] [tpot_ms=N]; EVENSTEP_API_KEYS may hold more, with ; between them. "
        "Unset: clients need no key.",
        metavar="FILE",
        live=IF_GIVEN,
    )
    worker_api_key_file: Annotated[str | None, read_by(read_key)] = setting(
        None, "File with the API key that the engines require (vLLM's --api-key).", metavar="FILE"
    )
    tell_worker_api_key: bool = setting(
        False,
        "Whether evenstep pick tells gateways that key, to show it to the engines. Whoever reaches "
        "the ports can read it then.",
    )
    admin_key_file: _KeyFile = setting(
        None,
        "File with keys that open the admin port, a line each: NAME KEY. With it the port may "
        "listen on any address.",
        metavar="FILE",
        live=IF_GIVEN,
    )

    @property
    def worker_key(self) -> str | None:
        return None if self.worker_api_key_file is None else read_key(self.worker_api_key_file)
