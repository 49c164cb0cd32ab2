"""Curve fits of runs: readers, models, fits, intervals, comparisons, figures.

from scalerl.fitting import fit, compare, backtest, read_runs
"""

from __future__ import annotations

from scalerl.fitting.backtest import Backtest, backtest
from scalerl.fitting.compare import Comparison, compare
from scalerl.fitting.errors import InputError
from scalerl.fitting.fit import fit
from scalerl.fitting.readers import read_runs
from scalerl.fitting.result import FitResult

__all__ = ["Backtest", "Comparison", "FitResult", "InputError", "backtest", "compare", "fit", "read_runs"]
