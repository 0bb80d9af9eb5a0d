from choreo.plans import *  # noqa
from choreo.plans import Plan, plan, plan_traced, graph  # noqa
