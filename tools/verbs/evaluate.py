"""Evaluate a run, a checkpoint or published weights."""

from bigscl.evaluation.evaluate_options import SEVERAL, EvaluationOptions

several = SEVERAL


def command(options: EvaluationOptions) -> None:
    from bigscl.evaluate import evaluate

    evaluate(options)
