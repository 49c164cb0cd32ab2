"""Eq. (1) of ScaleRL (arXiv 2510.13786), R = R0 + (A - R0) / (1 + (C_mid/C)^B), as a least-squares problem.

Parameters are theta = (A, m, b, R0) with m = ln C_mid - mean ln C and b = ln B: B > 0 by construction, and nothing
depends on the unit of compute. The base evaluation is one more observation, of R0."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import expit, log_expit

from scalerl.fitting.least_squares import Bools, Floats, minimise

A, M, B, R0 = range(4)
_B_RANGE = (np.log(0.01), np.log(300.0))
_M_NODES, _B_NODES, _STARTS = 48, 32, 8
_SEARCH_POINTS = 1000  # of a longer curve every k-th point enters the search for starts


@dataclass(frozen=True)
class Sigmoid:
    """The data of one fit. x: ln C, centred [n]; y: pass rates [n]; base: the evaluation at C = 0, or None.

    fixed_r0, fixed_a: held values, or None where they are fitted."""

    x: Floats
    y: Floats
    shift: float
    base: float | None
    fixed_r0: float | None
    fixed_a: float | None = None

    @classmethod
    def of(
        cls, compute: Floats, y: Floats, base: float | None, fixed_r0: float | None, fixed_a: float | None
    ) -> Sigmoid:
        logs = np.log(compute)
        shift = float(logs.mean())
        return cls(logs - shift, y, shift, base if fixed_r0 is None else None, fixed_r0, fixed_a)

    @property
    def n(self) -> int:
        """Observations: curve points, and the base evaluation where R0 is fitted to it."""
        return len(self.y) + (self.base is not None)

    @property
    def free(self) -> Bools:
        return np.array([self.fixed_a is None, True, True, self.fixed_r0 is None])

    @cached_property
    def bounds(self) -> tuple[Floats, Floats]:
        """lower, upper [4]. C_mid may lie e^25 beyond the data on either side, which is as good as anywhere."""
        a = (0.0, 1.0) if self.fixed_a is None else (self.fixed_a, self.fixed_a)
        r0 = (0.0, 1.0) if self.fixed_r0 is None else (self.fixed_r0, self.fixed_r0)
        m = (float(self.x.min()) - 25, float(self.x.max()) + 25)
        return tuple(np.array(side) for side in zip(a, m, _B_RANGE, r0, strict=True))  # pyright: ignore

    def residuals(self, theta: Floats) -> tuple[Floats, Floats]:
        """theta [K, 4] -> model minus data [K, n], Jacobian [K, n, 4]."""
        a, m, slope, r0 = theta[:, A, None], theta[:, M, None], np.exp(theta[:, B, None]), theta[:, R0, None]
        g = expit(slope * (self.x - m))
        bend = (a - r0) * g * (1 - g)
        jacobian = np.stack([g, -bend * slope, bend * slope * (self.x - m), 1 - g], axis=-1)
        return self._with_base(r0 + (a - r0) * g - self.y, jacobian, r0, R0)

    def pinned_by_m(self, theta: Floats, value: Floats, at: Floats) -> tuple[Floats, Floats]:
        """The same with the curve held at `value` [K] where x = `at` [K], m following from the rest: theta [K, 4],
        whose m is not read and has no derivative."""
        a, slope, r0, v = theta[:, A, None], np.exp(theta[:, B, None]), theta[:, R0, None], value[:, None]
        from_at = self.x - at[:, None]
        g = expit(slope * from_at + np.log((v - r0) / (a - v)))
        bend = (a - r0) * g * (1 - g)
        d_a, d_r0 = g - bend / (a - v), 1 - g - bend / (v - r0)
        jacobian = np.stack([d_a, np.zeros_like(g), bend * slope * from_at, d_r0], axis=-1)
        return self._with_base(r0 + (a - r0) * g - self.y, jacobian, r0, R0)

    def pinned_by_a(self, theta: Floats, value: Floats, at: Floats) -> tuple[Floats, Floats]:
        """The same with A following from the rest, which may put it above 1; theta's A is not read."""
        m, slope, r0, v = theta[:, M, None], np.exp(theta[:, B, None]), theta[:, R0, None], value[:, None]
        here, there = slope * (self.x - m), slope * (at[:, None] - m)
        g, g_at = expit(here), expit(there)
        share = np.exp(np.minimum(log_expit(here) - log_expit(there), 200.0))  # of the value's rise that x has
        fall, fall_at = share * (1 - g), share * (1 - g_at)
        d_m = -(v - r0) * slope * (fall - fall_at)
        d_b = (v - r0) * (here * fall - there * fall_at)
        jacobian = np.stack([np.zeros_like(share), d_m, d_b, 1 - share], axis=-1)
        return self._with_base(r0 + (v - r0) * share - self.y, jacobian, r0, R0)

    def _with_base(self, r: Floats, jacobian: Floats, r0: Floats, column: int) -> tuple[Floats, Floats]:
        if self.base is None:
            return r, jacobian
        row = np.zeros((len(r), 1, jacobian.shape[2]))
        row[:, 0, column] = 1.0
        return np.concatenate([r, r0 - self.base], axis=1), np.concatenate([jacobian, row], axis=1)

    def solve(self) -> tuple[Floats, float]:
        """(theta [4], sum of squares) of the best fit, from many starts."""
        starts = self._starts()
        theta, f = minimise(self.residuals, starts, self.free, *self.bounds, iterations=200)
        best = int(np.argmin(f))
        return theta[best], float(f[best])

    def _starts(self) -> Floats:
        """The best local minima of a table over (m, b), whose A and R0 are a linear problem; [K, 4]."""
        every = -(-len(self.x) // _SEARCH_POINTS)
        x, y = self.x[::every], self.y[::every]
        span = float(np.ptp(x))
        m = np.linspace(x.min() - 0.5 * span - 1, x.max() + span + 3, _M_NODES)
        b = np.linspace(np.log(0.15), np.log(20.0), _B_NODES)
        g = expit(np.exp(b)[None, :, None] * (x - m[:, None, None]))
        a, r0 = self._linear(g, y)
        r = r0[..., None] * (1 - g) + a[..., None] * g - y
        f = np.einsum("mbn,mbn->mb", r, r) + (0 if self.base is None else (r0 - self.base) ** 2)
        padded = np.pad(f, 1, constant_values=np.inf)
        around = np.min([np.roll(padded, s, (0, 1))[1:-1, 1:-1] for s in ((0, 1), (1, 0), (0, -1), (-1, 0))], axis=0)
        rank = np.argsort(np.where(f <= around, f, f + f.max() + 1), axis=None)[:_STARTS]
        i, j = np.unravel_index(rank, f.shape)
        return np.stack([a[i, j], m[i], b[j], r0[i, j]], axis=-1)

    def _linear(self, g: Floats, y: Floats) -> tuple[Floats, Floats]:
        """A and R0 by least squares for curves g [..., n], clipped to 0 <= R0 <= A <= 1."""
        gg, gy = np.einsum("mbn,mbn->mb", g, g), g @ y
        if self.fixed_r0 is not None:
            r0 = np.full(gg.shape, self.fixed_r0)
            a = (gy - self.fixed_r0 * (g.sum(-1) - gg)) / np.maximum(gg, 1e-300)
        else:
            h = 1 - g
            weight = 0.0 if self.base is None else 1.0
            hh, hg = np.einsum("mbn,mbn->mb", h, h) + weight, np.einsum("mbn,mbn->mb", h, g)
            hy = h @ y + weight * (self.base or 0.0)
            determinant = np.maximum(hh * gg - hg**2, 1e-12 * (hh * gg + 1e-300))
            r0, a = (gg * hy - hg * gy) / determinant, (hh * gy - hg * hy) / determinant
        a = np.clip(a, 0, 1) if self.fixed_a is None else np.full(gg.shape, self.fixed_a)
        return a, (r0 if self.fixed_r0 is not None else np.clip(r0, 0, a))

    def curve(self, theta: Floats, x: Floats) -> Floats:
        return theta[R0] + (theta[A] - theta[R0]) * expit(np.exp(theta[B]) * (x - theta[M]))
