"""The alert rules, by Prometheus's own tool."""

import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.support.metric_names import OTHERS, asked, own_metrics
from tests.support.prometheus import program

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "prometheus"


def rules(kind: str = "alert") -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


def promtool(*arguments: str) -> None:
    command = [program("promtool"), *arguments]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules_and_the_configuration() -> None:
    promtool("check", "rules", "rules.yml")
    promtool("check", "config", "prometheus.yml")


def test_rules_fire_when_they_should_and_not_otherwise() -> None:
    promtool("test", "rules", "rules_test.yml")


def test_every_rule_is_tested_both_ways() -> None:
    tests = yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]
    cases = [case for test in tests for case in test.get("alert_rule_test", ())]
    fired = {case["alertname"] for case in cases if case.get("exp_alerts")}
    silent = {case["alertname"] for case in cases if not case.get("exp_alerts")}

    assert fired == silent == {rule["alert"] for rule in rules()}


def test_every_recorded_figure_is_tested() -> None:
    tests = yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]
    asked_for = {case["expr"] for test in tests for case in test.get("promql_expr_test", ())}

    assert asked_for == {rule["record"] for rule in rules("record")}


def test_rules_ask_for_metrics_that_exist() -> None:
    names = set.union(*(asked(rule["expr"]) for rule in (*rules(), *rules("record"))))

    assert names - own_metrics() - OTHERS == {"up"}
