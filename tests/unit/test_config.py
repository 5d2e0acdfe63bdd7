"""One object says it all: flags, variables, help and messages follow from its fields."""

from __future__ import annotations

import dataclasses
import re
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_nodeagent.config import OPTIONS, AgentConfig
from lmcache_nodeagent.config_flags import ENV_PREFIX, Option, Value
from lmcache_nodeagent.config_parsing import parse_config
from lmcache_nodeagent.config_rules import bare_host
from lmcache_nodeagent.config_upstream import ACCEPTED_SWITCHES, REFUSED_FLAGS, UpstreamFlag
from lmcache_nodeagent.errors import ConfigError

SIZE = "--l1-size-gb=1"

# Flags of `lmcache server --help`, release 0.5.6, less --help.
UPSTREAM_FLAGS = """
--chunk-size --coordinator-advertise-ip --coordinator-blend-match-concurrency
--coordinator-blend-timeout --coordinator-event-flush-interval --coordinator-event-reporting
--coordinator-event-transport --coordinator-heartbeat-interval
--coordinator-kafka-bootstrap-servers --coordinator-kafka-delivery-timeout
--coordinator-kafka-topic --coordinator-url --disable-grpc-metrics --disable-logging
--disable-metrics --disable-observability --enable --enable-blend-reorder --enable-dedup-content
--enable-extra-logging --enable-gc-monitor --enable-segmented-prefix --enable-tracing --engine-type
--event-bus-queue-size --eviction-policy --eviction-ratio --eviction-trigger-watermark
--extra-logging-interval --format --gc-monitor-min-pause-ms --gc-monitor-top-objects
--gds-l1-backend --gds-l1-path --gds-l1-use-direct-io --grpc-server-workers --hash-algorithm --host
--http-host --http-port --instance-id --isolated-ipc --kv-event-log-size --l1-align-bytes
--l1-devdax-path --l1-init-size-gb --l1-manager --l1-read-ttl-seconds --l1-size-gb
--l1-use-hugepages --l1-use-lazy --l1-write-ttl-seconds --l2-adapter --l2-prefetch-max-in-flight
--l2-prefetch-policy --l2-store-policy --lookup-hash-log-dir --lookup-hash-log-max-files
--lookup-hash-log-rotation-interval --lookup-hash-log-rotation-max-size --max-cpu-workers
--max-gpu-workers --max-workers --metrics-sample-rate --no-gds-l1-use-direct-io --no-isolated-ipc
--no-l1-use-hugepages --no-l1-use-lazy --no-run-script-api-enabled --no-separate-object-groups
--null-block-id --otlp-endpoint --output --p2p-advertise-url --p2p-listen-url --p2p-load-timeout
--p2p-lookup-timeout --p2p-transfer-engine --periodic-notifier-interval-ms --port --prometheus-port
--quiet --run-script-api-enabled --runtime-plugin-config --runtime-plugin-locations
--script-allowed-imports --separate-object-groups --server-module --session-ttl-seconds --shm-name
--supported-transfer-mode --trace-level --trace-output --transport --worker-reap-timeout-seconds
--worker-registration-grace-seconds
"""


def problems_of(*argv: str, environ: dict[str, str] | None = None) -> tuple[str, ...]:
    """Return the problems of a command line that has some."""
    with pytest.raises(ConfigError) as caught:
        parse_config(argv, environ or {})
    return caught.value.problems


class TestPrecedence:
    """Flag, then variable, then default."""

    def test_defaults_are_those_of_lmcache_server(self) -> None:
        """Names and defaults that upstream has too are kept."""
        config = parse_config([SIZE], {})
        assert (config.host, config.port) == ("localhost", 5555)
        assert (config.http_host, config.http_port) == ("127.0.0.1", 8080)
        assert (config.chunk_size, config.null_block_id, config.max_workers) == (256, 0, 1)
        assert config.hash_algorithm == "blake3"
        assert config.supported_transfer_mode == "lmcache_driven"
        assert config.worker_reap_timeout_seconds == 120
        assert config.worker_registration_grace_seconds == 3600
        assert config.session_ttl_seconds == 600
        assert (config.l1_read_ttl_seconds, config.l1_write_ttl_seconds) == (300, 600)
        assert (config.eviction_trigger_watermark, config.eviction_ratio) == (0.8, 0.2)

    def test_a_variable_wins_over_the_default(self) -> None:
        """`LMCACHE_KUBE_` and the flag's name in capitals."""
        assert parse_config([SIZE], {"LMCACHE_KUBE_CHUNK_SIZE": "64"}).chunk_size == 64

    def test_a_flag_wins_over_its_variable(self) -> None:
        """What is on the command line was meant for this very start."""
        environ = {"LMCACHE_KUBE_CHUNK_SIZE": "64", "LMCACHE_KUBE_L1_SIZE_GB": "2"}
        config = parse_config(["--chunk-size", "32"], environ)
        assert (config.chunk_size, config.l1_size_gb) == (32, 2)

    def test_the_last_of_two_flags_wins(self) -> None:
        """So that a wrapper's defaults can be overridden."""
        assert parse_config([SIZE, "--port=1", "--port", "2"], {}).port == 2

    @pytest.mark.parametrize(("text", "on"), [("true", True), ("1", True), ("OFF", False)])
    def test_a_switch_can_be_a_variable(self, text: str, *, on: bool) -> None:
        """Switches take the usual words for yes and no."""
        environ = {"LMCACHE_KUBE_REAP_IDLE_CONNECTED": text}
        assert parse_config([SIZE], environ).reap_idle_connected is on

    def test_a_switch_can_be_turned_off_again(self) -> None:
        """The flag for no wins over a variable for yes."""
        environ = {"LMCACHE_KUBE_REAP_IDLE_CONNECTED": "yes"}
        config = parse_config([SIZE, "--no-reap-idle-connected"], environ)
        assert config.reap_idle_connected is False

    def test_variables_that_kubernetes_sets_for_a_service_are_not_ours(self) -> None:
        """A Service called lmcache-kube sets LMCACHE_KUBE_PORT=tcp://… in every pod."""
        config = parse_config([SIZE], {"LMCACHE_KUBE_PORT": "tcp://10.0.0.7:5555"})
        assert config.port == 5555

    def test_this_process_is_the_default_source(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without arguments, the command line and the environment are read."""
        monkeypatch.setattr("sys.argv", ["lmcache-nodeagent", SIZE])
        monkeypatch.setenv("LMCACHE_KUBE_PORT", "6000")
        assert parse_config().port == 6000


class TestMessages:
    """Every problem at once, each with value, limit and fix."""

    def test_all_problems_are_reported_together(self) -> None:
        """Unreadable values, broken bounds, broken relations, foreign and unknown flags."""
        problems = problems_of(
            "--l2-adapter={}",
            "--hots=a",
            "--port=many",
            "--chunk-size=0",
            "--worker-reap-timeout-seconds=25",
        )
        assert problems == (
            (
                "--l2-adapter {}: --l2-adapter is a flag of `lmcache server` that this agent does "
                "not support: there is no second cache level yet; leave it out, or size L1 with "
                "--l1-size-gb"
            ),
            "--hots=a is not a flag of this agent: did you mean --host?",
            "port is 'many', but must be a whole number: write it as --port 5555",
            (
                "l1-size-gb is missing, but has no default: give --l1-size-gb or set "
                "LMCACHE_KUBE_L1_SIZE_GB"
            ),
            "chunk-size is 0, but must be 1 or more: raise it to 1",
            "worker-reap-timeout-seconds is 25, but must be 0 (off) or 30 or more: raise it to 30",
            (
                "worker-reap-timeout-seconds is 25, but must be "
                "3 x worker-heartbeat-interval-seconds (10) = 30 or more: "
                "raise the timeout to 30 or lower the interval to 8"
            ),
        )

    def test_unreadable_text_alone_is_reported(self) -> None:
        """A configuration that would be fine without the bad value is still refused."""
        (problem,) = problems_of(SIZE, "--eviction-ratio=half")
        assert problem == (
            "eviction-ratio is 'half', but must be a number: write it as --eviction-ratio 0.2"
        )

    @pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
    def test_only_finite_numbers_count(self, text: str) -> None:
        """Not-a-number compares as neither too small nor too large."""
        (problem,) = problems_of(f"--l1-size-gb={text}")
        assert problem == (
            f"l1-size-gb is {text}, but must be a finite number: write it as --l1-size-gb 0.001"
        )

    @pytest.mark.parametrize(
        ("argument", "message"),
        [
            ("--port=70000", "port is 70000, but must be 65535 or less: lower it to 65535"),
            ("--port=-1", "port is -1, but must be 0 or more: raise it to 0"),
            ("--reap-mode=maybe", "reap-mode is 'maybe', but must be enforce or observe: choose"),
            ("--eviction-policy=ARC", "eviction-policy is 'ARC', but must be LRU or noop: adaptiv"),
            ("--eviction-policy=IsolatedLRU", "must be LRU or noop: quotas per cache salt are not"),
            ("--hash-algorithm=builtin", "hash-algorithm is 'builtin', but must be blake3: Python"),
            ("--hash-algorithm=sha256_cbor", "must be blake3: it is the slower hash"),
            ("--host=", "host is empty, but must have a value: leave it out for localhost"),
            ("--host=a b", "host is 'a b', but must be a host name, an address, or *"),
            ("--ipc-path=run/a.sock", "ipc-path is 'run/a.sock', but must be an absolute path"),
            ("--shm-name=a/b", "shm-name is 'a/b', but must be up to 100 letters, digits"),
            (f"--ipc-path=/{'a' * 107}", "ipc-path is 108 bytes long, but must be 107 or less"),
            ("--http-port=5555", "http-port is 5555, but must differ from port (5555)"),
            ("--close-confirm-seconds=2", "must be 3 or more: raise it to 3"),
            (
                "--max-waiting-bytes=500000000",
                "must be 2 x max-message-bytes (268435456) = 536870912 or more: raise it to",
            ),
            ("--close-confirm-seconds=20", "must be hint-confirm-seconds (15) or less"),
            ("--hint-confirm-seconds=121", "must be worker-reap-timeout-seconds (120) or less"),
            (
                "--worker-registration-grace-seconds=90",
                "must be worker-reap-timeout-seconds (120) or more: raise the grace to 120",
            ),
        ],
    )
    def test_each_rule_names_value_limit_and_fix(self, argument: str, message: str) -> None:
        """One broken rule gives one sentence."""
        (problem,) = problems_of(SIZE, argument)
        assert message in problem

    def test_a_switch_takes_only_yes_or_no(self) -> None:
        """A word that is neither is not taken for yes."""
        (problem,) = problems_of(SIZE, environ={"LMCACHE_KUBE_REAP_IDLE_CONNECTED": "maybe"})
        assert problem == (
            "reap-idle-connected is 'maybe', but must be true or false: write one of them"
        )

    def test_a_flag_without_its_value_is_a_problem_like_others(self) -> None:
        """The parser's own complaint takes the same way."""
        assert problems_of(SIZE, "--port") == ("argument --port: expected one argument",)

    def test_a_stray_word_is_reported(self) -> None:
        """There are no positional arguments."""
        (problem,) = problems_of(SIZE, "server")
        assert problem == "server is not a flag of this agent: see --help for those it has"

    def test_abbreviations_are_not_guessed(self) -> None:
        """A flag added later must not change what a shortened one means."""
        (problem,) = problems_of(SIZE, "--chunk=5")
        assert problem.startswith("--chunk=5 is not a flag of this agent")

    def test_a_configuration_made_in_code_is_checked_too(self) -> None:
        """The operator renders one without any text."""
        with pytest.raises(ConfigError, match="chunk-size is -1"):
            AgentConfig(l1_size_gb=1.0, chunk_size=-1)


class TestWindows:
    """The relations of the liveness windows hold unless reaping is off."""

    def test_a_timeout_of_zero_switches_the_relations_off(self) -> None:
        """Nothing is reaped, so nothing has to fit."""
        arguments = ["--worker-reap-timeout-seconds=0", "--worker-heartbeat-interval-seconds=500"]
        assert parse_config([SIZE, *arguments], {}).worker_reap_timeout_seconds == 0

    def test_the_smallest_windows_are_accepted(self) -> None:
        """The bounds themselves are inside."""
        config = AgentConfig(
            l1_size_gb=0.001,
            worker_reap_timeout_seconds=30.0,
            worker_registration_grace_seconds=30.0,
            worker_heartbeat_interval_seconds=10.0,
            hint_confirm_seconds=3.0,
            close_confirm_seconds=3.0,
        )
        assert config.close_confirm_seconds == 3

    @given(
        timeout=st.floats(0, 400),
        grace=st.floats(1, 400),
        interval=st.floats(0.1, 200),
        hint=st.floats(1, 400),
        close=st.floats(1, 400),
    )
    def test_what_is_accepted_keeps_the_relations(
        self, timeout: float, grace: float, interval: float, hint: float, close: float
    ) -> None:
        """Accepted or refused exactly as the design has it."""
        relations = grace >= timeout >= max(3 * interval, hint) and hint >= close
        expected = min(hint, close) >= 3 and (timeout == 0 or (timeout >= 30 and relations))
        try:
            AgentConfig(
                l1_size_gb=1.0,
                worker_reap_timeout_seconds=timeout,
                worker_registration_grace_seconds=grace,
                worker_heartbeat_interval_seconds=interval,
                hint_confirm_seconds=hint,
                close_confirm_seconds=close,
            )
        except ConfigError:
            assert not expected
        else:
            assert expected


class TestUpstreamFlags:
    """A command line of `lmcache server` works or says why not."""

    def test_every_flag_of_lmcache_server_is_known(self) -> None:
        """None ends as merely unknown."""
        known = {option.flag_name for option in OPTIONS} | set(ACCEPTED_SWITCHES)
        known |= {flag.name for flag in REFUSED_FLAGS}
        assert set(UPSTREAM_FLAGS.split()) <= known

    @pytest.mark.parametrize("flag", REFUSED_FLAGS, ids=lambda flag: flag.name)
    def test_a_flag_without_a_meaning_here_is_refused_with_advice(self, flag: UpstreamFlag) -> None:
        """Once per use, whatever its value."""
        (problem,) = problems_of(SIZE, flag.name, "a-value")
        assert "is a flag of `lmcache server` that this agent does not support: " in problem
        assert problem.endswith(flag.advice)

    def test_a_refused_switch_needs_no_value(self) -> None:
        """It is recognised without one."""
        (problem,) = problems_of("--isolated-ipc", SIZE)
        assert problem.startswith("--isolated-ipc: --isolated-ipc is a flag of `lmcache server`")

    def test_each_use_is_reported(self) -> None:
        """`--l2-adapter` may be repeated upstream."""
        assert len(problems_of(SIZE, "--l2-adapter=a", "--l2-adapter=b")) == 2

    def test_what_this_agent_does_anyway_is_accepted(self) -> None:
        """Asking for it changes nothing."""
        arguments = ["--transport", "zmq", "--engine-type=default", *ACCEPTED_SWITCHES]
        assert parse_config([SIZE, *arguments], {}) == AgentConfig(l1_size_gb=1.0)


class TestDerived:
    """What follows from the fields."""

    def test_one_option_per_field(self) -> None:
        """Nothing is declared twice or forgotten."""
        assert sorted(option.field_name for option in OPTIONS) == sorted(
            field.name for field in dataclasses.fields(AgentConfig)
        )

    @pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.label)
    def test_every_option_is_well_described(self, option: Option) -> None:
        """Help is a sentence, numbers have bounds, the default keeps them."""
        assert option.flag.about.endswith(".")
        assert option.kind in {bool, str} or option.flag.bounds
        assert option.required or option.problem(option.default) is None
        assert option.env_name.startswith(ENV_PREFIX)

    def test_help_has_every_flag_in_its_group(self, capsys: pytest.CaptureFixture[str]) -> None:
        """And its default, and no foreign flag."""
        with pytest.raises(SystemExit) as caught:
            parse_config(["--help"], {})
        text = capsys.readouterr().out
        assert caught.value.code == 0
        for option in OPTIONS:
            assert f"  {option.flag_name}" in text
            assert f"\n{option.flag.group}:\n" in text
        assert "default 256" in text
        assert "--l2-adapter" not in text

    def test_version_is_printed(self, capsys: pytest.CaptureFixture[str]) -> None:
        """That of the installed wheel."""
        with pytest.raises(SystemExit):
            parse_config(["--version"], {})
        assert re.fullmatch(r"\d+\.\d+\S*\n", capsys.readouterr().out)

    def test_sizes_are_binary(self) -> None:
        """A GB is 2**30 bytes, as upstream counts."""
        assert AgentConfig(l1_size_gb=1.5).l1_size_bytes == 3 << 29

    def test_pools_have_max_workers_threads_unless_given(self) -> None:
        """Each pool can be sized on its own."""
        config = AgentConfig(l1_size_gb=1.0, max_workers=3, max_gpu_workers=5)
        assert (config.normal_threads, config.transfer_threads) == (3, 5)
        config = AgentConfig(l1_size_gb=1.0, max_workers=3, max_cpu_workers=2)
        assert (config.normal_threads, config.transfer_threads) == (2, 3)

    def test_the_region_is_named_by_flag_or_port(self) -> None:
        """Two agents of one machine differ in one of them."""
        assert AgentConfig(l1_size_gb=1.0, shm_name="uid-1").pool_name == "uid-1"
        assert AgentConfig(l1_size_gb=1.0).pool_name == "port-5555"

    def test_the_region_has_no_name_before_the_port_is_known(self) -> None:
        """Otherwise all agents with port 0 would share one."""
        with pytest.raises(AssertionError, match="not known yet"):
            _ = AgentConfig(l1_size_gb=1.0, port=0).pool_name

    def test_both_ports_may_be_free_ones(self) -> None:
        """0 twice is not the same port twice."""
        assert AgentConfig(l1_size_gb=1.0, port=0, http_port=0).http_port == 0

    @pytest.mark.parametrize(
        ("host", "bare"), [("[::]", "::"), ("::1", "::1"), ("localhost", "localhost"), ("*", "*")]
    )
    def test_brackets_of_an_ipv6_host_come_off(self, host: str, bare: str) -> None:
        """Both spellings are accepted."""
        assert parse_config([SIZE, f"--host={host}"], {}).host == host
        assert bare_host(host) == bare


def values_of(option: Option) -> st.SearchStrategy[Value]:
    """Values that the option's own bounds allow."""
    if option.choices:
        return st.sampled_from(option.choices)
    if option.kind is bool:
        return st.booleans()
    if option.kind is str:
        is_path = option.flag.pattern_words == "an absolute path"
        return st.sampled_from([option.default, "/a-b.c" if is_path else "a-b.c"])
    assert option.flag.bounds is not None
    low, high = option.flag.bounds.low, option.flag.bounds.high
    if option.kind is int:
        return st.integers(int(low), int(high))
    return st.floats(low, high)


@given(st.fixed_dictionaries({option.field_name: values_of(option) for option in OPTIONS}))
def test_arguments_give_the_same_configuration_again(values: dict[str, typing.Any]) -> None:
    """`to_args` and parsing are each other's inverse for every valid configuration."""
    values["worker_reap_timeout_seconds"] = 0.0  # whatever the other windows are
    values["port"] = 0
    values["max_waiting_bytes"] = 2 * values["max_message_bytes"]
    values["slots_folder"] = "/run/slots"  # however short a path of another length may be
    config = AgentConfig(**values)
    assert parse_config(config.to_args(), {}) == config


def test_bounds_are_said_in_words() -> None:
    """For help and the reference."""
    words = {option.label: option.bounds_words() for option in OPTIONS}
    assert words["port"] == "0 to 65535"
    assert words["log-level"] == "debug, info, warning or error"
    assert words["worker-reap-timeout-seconds"] == "0 or 30 to 31536000"
    assert words["ipc-path"] == "an absolute path"


def test_a_switch_that_is_on_by_default_is_written_as_no() -> None:
    """Whichever way it deviates."""
    (switch,) = (option for option in OPTIONS if option.kind is bool)
    assert switch.argument(value=False) == "--no-reap-idle-connected"


def test_defaults_need_no_arguments() -> None:
    """What the operator renders shows only what somebody chose."""
    assert AgentConfig(l1_size_gb=20.0).to_args() == ["--l1-size-gb=20"]
    config = AgentConfig(l1_size_gb=0.5, reap_idle_connected=True, max_cpu_workers=4)
    assert config.to_args() == [
        "--l1-size-gb=0.5",
        "--max-cpu-workers=4",
        "--reap-idle-connected",
    ]
