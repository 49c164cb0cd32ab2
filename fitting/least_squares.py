"""Levenberg-Marquardt with bounds for many small problems at once: a fit's starts, or the ends of its intervals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
# theta [K, p] -> residuals [K, n], their Jacobian [K, n, p]
Residuals = Callable[[Floats], tuple[Floats, Floats]]

_TOLERANCE = 1e-13  # relative decrease of the sum of squares that ends an iteration
_GIVE_UP = 1e12  # damping


def minimise(
    residuals: Residuals, theta: Floats, free: Bools, lower: Floats, upper: Floats, *, iterations: int = 80
) -> tuple[Floats, Floats]:
    """(theta [K, p], sums of squares [K]) of K independent problems, from the given starts.

    free: bool [p] or [K, p], parameters that move; lower, upper: [p] or [K, p]. A parameter at a bound that the
    gradient pushes against is held there. Deterministic; never worse than the start."""
    theta = np.clip(theta, lower, upper)
    r, jacobian = residuals(theta)
    f = np.einsum("kn,kn->k", r, r)
    damping = np.full(len(theta), 1e-3)
    done = np.zeros(len(theta), dtype=bool)
    diagonal = np.arange(theta.shape[1])
    for _ in range(iterations):
        gradient = np.einsum("knp,kn->kp", jacobian, r)
        held = ~free | ((theta <= lower) & (gradient > 0)) | ((theta >= upper) & (gradient < 0))
        hessian = jacobian.transpose(0, 2, 1) @ jacobian
        hessian[held[:, :, None] | held[:, None, :]] = 0.0
        scale = hessian[:, diagonal, diagonal]
        hessian[:, diagonal, diagonal] = scale * (1 + damping[:, None]) + np.where(held, 1.0, 1e-14 + 1e-12 * scale)
        gradient[held] = 0.0
        step = -np.linalg.solve(hessian, gradient[:, :, None])[:, :, 0]
        trial = np.clip(theta + step, lower, upper)
        r_trial, jacobian_trial = residuals(trial)
        f_trial = np.einsum("kn,kn->k", r_trial, r_trial)
        better = (f_trial < f) & ~done
        hoped = -np.einsum("kp,kp->k", gradient, step)
        gain = np.where(better, np.maximum(f - f_trial, hoped), hoped)
        done |= (gain <= _TOLERANCE * f) | (damping > _GIVE_UP) | (f <= 1e-28)
        theta = np.where(better[:, None], trial, theta)
        r = np.where(better[:, None], r_trial, r)
        jacobian = np.where(better[:, None, None], jacobian_trial, jacobian)
        f = np.where(better, f_trial, f)
        damping = np.where(better, damping * 0.2, damping * 6)
        if done.all():
            break
    return theta, f
