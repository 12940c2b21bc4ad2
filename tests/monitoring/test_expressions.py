"""Dashboards and alert rules use only metrics that the services expose."""

import promql_parser
import pytest

from tests.monitoring.expressions import (
    Question,
    alert_questions,
    dashboard_questions,
    exposed_series,
    selectors,
    walk,
)

QUESTIONS = [*dashboard_questions(), *alert_questions()]
SERIES = exposed_series()

all_questions = pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.place)


def test_there_are_questions_to_check() -> None:
    assert len(dashboard_questions()) > 30
    assert len(alert_questions()) >= 5


@all_questions
def test_an_expression_is_promql_about_metrics_that_exist(question: Question) -> None:
    found = selectors(promql_parser.parse(question.concrete("5m")))
    assert found
    for selector in found:
        assert selector.name in SERIES, f"no service exposes {selector.name}"


@all_questions
def test_an_expression_uses_only_labels_that_its_metrics_have(question: Question) -> None:
    expression = promql_parser.parse(question.concrete("5m"))
    for selector in selectors(expression):
        asked = {matcher.name for matcher in selector.matchers.matchers}
        assert asked <= SERIES[selector.name].labels
    for part in walk(expression):
        if isinstance(part, promql_parser.AggregateExpr) and part.modifier is not None:
            for selector in selectors(part.expr):
                assert set(part.modifier.labels) <= SERIES[selector.name].labels


@all_questions
def test_rates_are_taken_of_what_only_grows_and_of_nothing_else(question: Question) -> None:
    expression = promql_parser.parse(question.concrete("5m"))
    rated = set()
    for part in walk(expression):
        if isinstance(part, promql_parser.Call) and part.func.name in ("rate", "increase"):
            for selector in selectors(part.args[0]):
                assert SERIES[selector.name].kind in ("counter", "histogram")
                rated.add(selector.name)
    for selector in selectors(expression):
        if SERIES[selector.name].kind == "histogram":
            assert selector.name in rated


def test_an_unknown_metric_and_a_syntax_error_would_be_found() -> None:
    [selector] = selectors(promql_parser.parse("rate(pagestream:no_such_total[5m])"))
    assert selector.name not in SERIES
    with pytest.raises(ValueError, match="parenthesis"):
        promql_parser.parse("sum(pagestream:epoch")
