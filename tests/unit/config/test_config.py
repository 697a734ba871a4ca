import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from router.commands.serve_command import serve
from router.config.balancing_settings import REPLACED
from router.config.serve_settings import ServeSettings
from router.config.setting_sources import changed, flag_name, load_settings, to_toml
from router.config.worker_notation import parse_worker
from router.core.errors import ConfigError
from router.core.policies.policy_table import POLICIES
from router.core.targets import Targets
from router.core.types import Dispatch, WorkerSpec
from router.engines.curve_keys import write_key_pair
from router.http.port import DataPlane


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ServeSettings.model_fields, "config"):
        monkeypatch.delenv(f"EVENSTEP_{name.upper()}", raising=False)


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "evenstep.toml"
    path.write_text(text)
    return path


# --- sources --------------------------------------------------------------------------------------


def test_defaults() -> None:
    settings = load_settings({})
    assert settings == ServeSettings()
    assert (settings.host, settings.port, settings.workers) == ("127.0.0.1", 8000, ())
    assert (settings.policy, settings.dispatch) == ("bfio", Dispatch.POOL)


def test_flags_beat_environment_beats_file_beats_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = toml(tmp_path, "port = 1\npool_size = 1\nseed = 1\n")
    monkeypatch.setenv("EVENSTEP_PORT", "2")
    monkeypatch.setenv("EVENSTEP_POOL_SIZE", "2")
    settings = load_settings({"port": "3"}, config)
    assert (settings.port, settings.pool_size, settings.seed) == (3, 2, 1)
    assert settings.queue_timeout_s == 60


def test_the_data_plane_comes_from_every_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_settings({}).data_plane is DataPlane.SPLICE
    assert 'data_plane = "splice"' in to_toml(load_settings({}))
    asgi = toml(tmp_path, 'data_plane = "asgi"')
    assert load_settings({}, asgi).data_plane is DataPlane.ASGI
    monkeypatch.setenv("EVENSTEP_DATA_PLANE", "splice")
    assert load_settings({}, asgi).data_plane is DataPlane.SPLICE
    assert load_settings({"data_plane": "asgi"}, asgi).data_plane is DataPlane.ASGI


def test_the_constructor_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSTEP_PORT", "2")
    assert ServeSettings().port == 8000


def test_workers_come_from_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = toml(
        tmp_path,
        'workers = ["http://a:1,slots=4", {url = "http://a:2", rank = 0, snapshots = "tcp://127.0.0.1:5"}]',
    )
    assert load_settings({}, config).workers == (
        WorkerSpec("a:1", "http://a:1", slots=4),
        WorkerSpec("a:2#0", "http://a:2", rank=0, snapshots="tcp://127.0.0.1:5"),
    )
    monkeypatch.setenv("EVENSTEP_WORKERS", "http://b:1 http://b:2,group=x")
    assert load_settings({}, config).workers == (
        WorkerSpec("b:1", "http://b:1"),
        WorkerSpec("b:2", "http://b:2", group="x"),
    )
    assert [w.id for w in load_settings({"workers": ["http://c:1"]}, config).workers] == ["c:1"]


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        ServeSettings().port = 1


def test_printed_settings_load_back_to_themselves(tmp_path: Path) -> None:
    settings = load_settings(
        {
            "host": '::1 "q" \\ \x7f é',
            "port": "0",
            "policy": "jsq",
            "dispatch": "instant",
            "queue_timeout_s": "1.25e-3",
            "workers": [
                "http://a:1,group=x,role=decode,rank=3,slots=7,snapshots=ipc:///s,id=w",
                "https://b/base/",
            ],
        }
    )
    assert load_settings({}, toml(tmp_path, to_toml(settings))) == settings


def test_every_setting_can_be_printed_and_has_a_description(tmp_path: Path) -> None:
    printed = to_toml(load_settings({"workers": ["http://a:1"]}))
    for name, field in ServeSettings.model_fields.items():
        assert name in printed
        assert field.description


def test_variables_of_kubernetes_services_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "EVENSTEP_PORT": "tcp://10.0.0.1:8000",
        "EVENSTEP_SERVICE_HOST": "10.0.0.1",
        "EVENSTEP_SERVICE_PORT": "8000",
        "EVENSTEP_SERVICE_PORT_HTTP": "8000",
        "EVENSTEP_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "EVENSTEP_PORT_8000_TCP_ADDR": "10.0.0.1",
        "EVENSTEP_METRICS_PORT": "tcp://10.0.0.2:9000",
    }.items():
        monkeypatch.setenv(name, value)
    assert load_settings({}) == ServeSettings()


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REPLACED)
def test_a_setting_that_is_no_more_says_what_has_replaced_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f"{name} is no setting any more: {REPLACED[name]}"
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_settings({}, toml(tmp_path, f"{name} = 1"))
    with pytest.raises(ConfigError, match=re.escape(said)):
        changed(ServeSettings(), {name: 1})
    flag = flag_name(name)
    app = typer.Typer()
    app.command()(serve)
    given = CliRunner().invoke(app, [flag, "1", "--print-config"])
    assert given.exit_code != 0
    assert f"{said} (from {flag})" in str(given.exception)
    monkeypatch.setenv(f"EVENSTEP_{name.upper()}", "1")
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_settings({})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"port": "abc"}, r"port = 'abc' should be a valid integer.* \(from --port\)"),
        ({"admin_host": "0.0.0.0"}, r"admin_host 0\.0\.0\.0 can be reached from other machines"),
        ({"port": "70000"}, r"port = '70000' should be less than or equal to 65535 \(from --port"),
        ({"pool_size": "0"}, r"pool_size = '0' should be greater than or equal to 1"),
        ({"queue_timeout_s": "nan"}, r"should be a finite number \(from --queue-timeout\)"),
        ({"policy": "bfoi"}, r"unknown policy 'bfoi'; did you mean bfio\? \(from --policy\)"),
        ({"dispatch": "now"}, r"dispatch = 'now' should be 'pool' or 'instant' \(from --dispatch"),
        (
            {"data_plane": "raw"},
            r"data_plane = 'raw' should be 'splice' or 'asgi' \(from --",
        ),
        ({"log_level": "loud"}, r"log_level = 'loud' should be 'debug', "),
        ({"workers": 5}, r"workers should be a list \(from --worker\)"),
    ],
)
def test_wrong_values_name_setting_value_range_and_source(
    flags: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_settings(flags)
    assert "\n" not in str(caught.value)


def test_wrong_values_name_the_variable_or_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = toml(tmp_path, "seed = -1")
    with pytest.raises(ConfigError, match=r"seed = -1 .* \(from .*evenstep.toml\)"):
        load_settings({}, config)
    monkeypatch.setenv("EVENSTEP_SEED", "x")
    with pytest.raises(ConfigError, match=r"seed = 'x' .* \(from EVENSTEP_SEED\)"):
        load_settings({}, config)


def test_a_setting_that_nobody_gave_has_no_source() -> None:
    with pytest.raises(ConfigError) as wrong:
        load_settings({"tls_cert": "nowhere.pem"})
    assert str(wrong.value) == "cannot read nowhere.pem: No such file or directory"


def test_unknown_names_are_errors_that_name_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"'prot'; did you mean port\? \(in .*evenstep.toml\)"):
        load_settings({}, toml(tmp_path, "prot = 1"))
    with pytest.raises(ConfigError, match=r"unknown key 'slot'; did you mean slots\?"):
        load_settings({}, toml(tmp_path, '[[workers]]\nurl = "http://a:1"\nslot = 1'))
    monkeypatch.setenv("EVENSTEP_POOLSIZE", "1")
    with pytest.raises(ConfigError, match=r"EVENSTEP_POOLSIZE'; did you mean EVENSTEP_POOL_SIZE\?"):
        load_settings({})


@pytest.mark.parametrize("dispatch", Dispatch)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_is_refused_the_dispatch_that_it_cannot_do(
    policy: str, dispatch: Dispatch
) -> None:
    flags = {"policy": policy, "dispatch": dispatch.value}
    if dispatch in POLICIES[policy].dispatch:
        assert load_settings(flags).dispatch is dispatch
    else:
        with pytest.raises(ConfigError, match=f"policy {policy} can dispatch by .* only"):
            load_settings(flags)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*missing.toml: No such file"):
        load_settings({}, tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match=r"is not TOML: .*line 1"):
        load_settings({}, toml(tmp_path, "port = ]\n"))
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_settings({}, binary)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({}, Targets()),
        ({"prompt_budget": "off"}, None),
        ({"prompt_budget": 512}, 512),
        ({"prompt_budget": "512"}, 512),
        ({"prompt_budget": "auto"}, Targets()),
        ({"prompt_budget": "auto", "target_tpot_s": 0.04}, Targets(None, 0.04)),
        ({"prompt_budget": "auto", "target_ttft_s": "1"}, Targets(1.0)),
    ],
)
def test_prompt_budgets(given: dict[str, object], rule: object) -> None:
    assert load_settings(given).prompt_rule == rule


@pytest.mark.parametrize("given", ["0", "fast", "1.5", 1 << 31])
def test_prompt_budgets_that_are_none(given: object) -> None:
    with pytest.raises(ConfigError, match=f"takes auto, off, or tokens above 0, got {given}"):
        load_settings({"prompt_budget": given})


@pytest.mark.parametrize("budget", ["off", 512])
@pytest.mark.parametrize("target", ["target_ttft_s", "target_tpot_s"])
def test_targets_need_a_budget_that_follows_them(target: str, budget: object) -> None:
    given = {target: 0.04, "prompt_budget": budget}
    with pytest.raises(ConfigError, match="--target-tpot need --prompt-budget auto"):
        load_settings(given)


# --- workers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("http://h:1", WorkerSpec("h:1", "http://h:1")),
        ("http://h", WorkerSpec("h:80", "http://h")),
        ("https://h/v/", WorkerSpec("h:443", "https://h/v")),
        ("http://[::1]:5", WorkerSpec("[::1]:5", "http://[::1]:5")),
        ("http://h:1,rank=0", WorkerSpec("h:1#0", "http://h:1", rank=0)),
        ("http://h:1,id=w,rank=0", WorkerSpec("w", "http://h:1", rank=0)),
        ("http://h:1,service_rate=.5", WorkerSpec("h:1", "http://h:1", service_rate=0.5)),
        ("http://h:1, role=decode", WorkerSpec("h:1", "http://h:1", role="decode")),
    ],
)
def test_worker_texts(text: str, spec: WorkerSpec) -> None:
    assert parse_worker(text) == spec


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("h:1", "url 'h:1' should look like http://HOST:PORT"),
        ("", "url '' should look like"),
        ("ftp://h", "should look like"),
        ("ftp://h:5", "should look like"),
        ("http://:80", "should look like"),
        ("http://h:0", "should look like"),
        ("http://h:99999", "should look like"),
        ("http://h:1?x=1", "no user, query or fragment"),
        ("http://u:p@h:1", "no user, query or fragment"),
        ("http://h:1,x", "'x' is not key=value"),
        ("http://h:1,rank=1,rank=2", "rank is given twice"),
        ("http://h:1,url=http://h:2", "url is given twice"),
        ("http://h:1,rank=-1", "rank = '-1' should be greater than or equal to 0"),
        ("http://h:1,slots=0", "slots = '0' should be greater than or equal to 1"),
        ("http://h:1,service_rate=0", "service_rate = '0' should be greater than 0"),
        ("http://h:1,service_rate=1e308", "service_rate = '1e308' should be less than or equal"),
        ("http://h:1,service_rate=inf", "service_rate = 'inf' should be a finite number"),
        ("http://h:1,role=both2", "role = 'both2' should be 'both', 'prefill' or 'decode'"),
        ("http://h:1,kv_events=h:9", "kv_events 'h:9' should be tcp://HOST:PORT or ipc://PATH"),
        ("http://h:1,kv_replay=tcp://h:9", "kv_replay repeats what kv_events tells: give both"),
        ("http://h:1,kv_events=tcp://h:65536", "kv_events 'tcp://h:65536' needs a port from 1 to"),
        ("http://h:1,kv_events=tcp://h:9,kv_replay=tcp://h:9", "another endpoint than kv_events"),
        (
            "http://h:1,kv_events=tcp://h:9,snapshots=tcp://127.0.0.1:5600",
            "kv_events is for engines without the plug-in",
        ),
        ("http://h:1,kv_bootstrap=http://h:9", "kv_bootstrap is for a worker with role=prefill"),
        ("http://h:1,role=prefill,kv_bootstrap=h:9", "url 'h:9' should look like http://HOST:PORT"),
        ("http://h:1,group=x/prefill", "a name that ends so means prefill workers"),
        ("http://h:1,group=", "group = '' should have at least 1 character"),
        ("http://h:1,grup=x", "unknown key 'grup'; did you mean group"),
        ("http://h:1,snapshots=h:5", "should be tcp://HOST:PORT or ipc://PATH"),
        ("http://h:1,snapshots=tcp://h", "should be tcp://HOST:PORT or ipc://PATH"),
        ("http://h:1,snapshots=tcp://*:5", "should be tcp://HOST:PORT or ipc://PATH"),
        ("http://h:1,snapshots=tcp://h:65535", "needs a port from 1 to 65534"),
        ("http://h:1,snapshots=tcp://h:5", "read and forged by other machines: give server_key="),
        ("http://h:1,snapshots=tcp://10.0.0.7:5", "or use an endpoint on 127.0.0.1"),
        ("http://h:1,server_key=abc", "'abc' is neither a public CURVE key of 40 characters nor"),
        ("http://h:1,power=h:5", "power 'h:5' should be tcp://HOST:PORT or ipc://PATH"),
        ("http://h:1,power=tcp://h:5", "power tcp://h:5 can be read and forged by other machines"),
        ({"rank": 1}, "url is required"),
        ({"url": 5}, "url = 5 should be a valid string"),
        (5, "worker 5 should be URL"),
    ],
)
def test_bad_workers(entry: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_worker(entry)
    assert message in str(caught.value)


def test_a_worker_that_is_one_already() -> None:
    spec = WorkerSpec("w", "http://h:1")
    assert parse_worker(spec) is spec


def test_workers_must_differ() -> None:
    with pytest.raises(ConfigError, match=r"two workers are called 'a:1': give each a rank"):
        load_settings({"workers": ["http://a:1", "http://a:1"]})
    with pytest.raises(ConfigError, match=r"'a:1' and 'b:1' have one kv_events endpoint"):
        load_settings({"workers": [f"http://{h}:1,kv_events=tcp://h:5557" for h in "ab"]})
    ends = ((host, f"kv_events=tcp://{host}:1,kv_replay=tcp://h:2") for host in "ab")
    repeated = [f"http://{host}:1,{end}" for host, end in ends]
    with pytest.raises(ConfigError, match=r"'a:1' and 'b:1' have one kv_replay endpoint"):
        load_settings({"workers": repeated})
    with pytest.raises(ConfigError, match=r"'a:1' and 'b:1' have one snapshot endpoint"):
        load_settings({"workers": [f"http://{host}:1,snapshots=tcp://[::1]:5" for host in "ab"]})
    assert len(load_settings({"workers": ["http://a:1,rank=0", "http://a:1,rank=1"]}).workers) == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [("", ""), (",rank=1", ",rank=1"), ("", ",rank=1"), (",rank=0", ""), ("", ",role=prefill")],
)
def test_one_engine_is_no_two_workers(one: str, other: str) -> None:
    both = [f"http://a:1{one},id=x", f"http://a:1/{other},id=y", "http://a:1,rank=7,id=z"]
    message = "workers 'x' and 'y' are one engine, http://a:1: if it has several ranks, give each"
    with pytest.raises(ConfigError, match=message):
        load_settings({"workers": both[:2]})
    with pytest.raises(ConfigError, match=message):
        load_settings({"workers": both})


def test_somebody_must_decode() -> None:
    prefill = "http://a:1,group=x,role=prefill"
    with pytest.raises(ConfigError, match=r"group 'x' has prefill workers alone: at least one"):
        load_settings({"workers": [prefill, "http://b:1"]})
    assert len(load_settings({"workers": [prefill, "http://b:1,group=x,role=decode"]}).workers) == 2


def test_keys_come_from_files_or_as_they_are(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    write_key_pair(ours)
    key = write_key_pair(theirs)
    printed = tmp_path / "printed"
    printed.write_text(f"{key}\n")
    worker = "http://a:1,snapshots=tcp://a:5,server_key="
    for given in (key, str(theirs), str(printed)):
        flags = {"workers": [worker + given], "secret_key_file": str(ours)}
        assert load_settings(flags).workers[0].server_key == key
    needs = r"a:1 has a server_key, which needs --secret-key-file: .* \(from --worker\)$"
    with pytest.raises(ConfigError, match=needs):
        load_settings({"workers": [worker + key]})
    with pytest.raises(ConfigError, match=r"no key file '.*nothing'; make one with: evenstep"):
        load_settings({**flags, "secret_key_file": str(tmp_path / "nothing")})


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "No public key found"),
        ("public-key = short", "a key has 40 characters"),
        (f"public-key = {'x' * 40}\nsecret-key = short", "a key has 40 characters"),
        (f"public-key = {'x' * 40}", "holds no secret key; make one with: evenstep keygen"),
    ],
)
def test_bad_key_files(tmp_path: Path, text: str, wrong: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=wrong):
        load_settings({"secret_key_file": str(file)})


def test_a_lockstep_group_must_have_workers() -> None:
    workers = ["http://a:1,group=moe"]
    assert load_settings({"workers": workers, "lockstep": ["moe"]}).lockstep == ("moe",)
    assert load_settings({"workers": workers, "lockstep": "moe=no"}).lockstep == ("moe=no",)
    with pytest.raises(ConfigError, match="unknown lockstep group 'more'; did you mean moe"):
        load_settings({"workers": workers, "lockstep": "more=no"})
    with pytest.raises(ConfigError, match="group 'moe' is given twice"):
        load_settings({"workers": workers, "lockstep": ["moe", "moe=no"]})
    with pytest.raises(ConfigError, match="takes GROUP or GROUP=no, got moe=yes"):
        load_settings({"workers": workers, "lockstep": "moe=yes"})


def test_flag_names() -> None:
    assert flag_name("workers") == "--worker"
    assert flag_name("queue_timeout_s") == "--queue-timeout"
    assert flag_name("retry_min_per_s") == "--retry-min-per-s"
