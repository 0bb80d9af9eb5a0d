"""A plan as text."""


def format_plan(plan) -> str:
    return repr(plan.layout)
