"""Peculiarities of `cohort.jax`'s operations, eagerly and in compiled programs: bits, gradients compared with differences,
JAX's transformations of functions. Needs at least two ranks. test_hvd_shared.py has the tests common to all
frameworks."""

import functools
import unittest

from support_jax import Case, hvd, jax, np, setUpModule, tearDownModule  # noqa: F401

if jax is not None:
    import jax.numpy as jnp


def both(test):
    """Runs a test with plain functions and with compiled ones."""

    @functools.wraps(test)
    def run(self):
        for compiled in (False, True):
            with self.subTest(compiled=compiled):
                test(self, jax.jit if compiled else lambda function: function, "jit" if compiled else "now")

    return run


class Values(Case):
    @both
    def test_sums_are_folded_by_ascending_rank(self, compile, name):
        for shape in ((), (1,), (7,), (3, 5), (40000,), (0, 3)):
            total = functools.reduce(np.add, self.of_all(shape))
            reduce = compile(lambda x, shape=shape: hvd.allreduce(x, name=f"{name}.sum.{shape}", op=hvd.Sum))
            self.same(reduce(self.own(shape)), total)
            mean = compile(lambda x, shape=shape: hvd.allreduce(x, name=f"{name}.mean.{shape}"))
            self.same(mean(self.own(shape)), (total / np.float32(self.size)).astype(np.float32))

    @both
    def test_flags(self, compile, name):
        own = jnp.array([False, True, self.rank > 0])
        self.same(compile(lambda x: hvd.allreduce(x, name=f"{name}.flags", op=hvd.Max))(own), np.array([False, True, True]))

    @both
    def test_factors_minimum_maximum_product(self, compile, name):
        own, every = self.own((9,)), self.of_all((9,))
        for op, fold in ((hvd.Min, np.minimum), (hvd.Max, np.maximum), (hvd.Product, np.multiply)):
            reduce = compile(lambda x, op=op: hvd.allreduce(x, name=f"{name}.{op}", op=op))
            self.same(reduce(own), functools.reduce(fold, every))
        scaled = compile(
            lambda x: hvd.allreduce(x, name=f"{name}.scaled", op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
        )
        self.same(scaled(own), functools.reduce(np.add, [np.float32(0.5) * one for one in every]) * np.float32(4))

    def test_uneven_under_jit_fails_on_all(self):
        gather = jax.jit(lambda x: hvd.allgather(x, name="uneven"))
        with self.assertRaisesRegex(Exception, r"brought \[.*\] rows.*bring equal rows"):
            gather(self.own((self.rank + 1,))).block_until_ready()
        self.same(
            jax.jit(lambda x: hvd.allreduce(x, name="after", op=hvd.Sum))(jnp.ones(2)), np.full(2, self.size, "f4")
        )

    def test_disagreement_is_told_on_all(self):
        for compile in (jax.jit, lambda function: function):
            shape = (2,) if self.rank == 0 else (3,)
            with self.assertRaisesRegex(Exception, r"(?s)float32\[2\].*float32\[3\]|float32\[3\].*float32\[2\]"):
                compile(lambda x: hvd.allreduce(x, name="disagree"))(self.own(shape)).block_until_ready()

    def test_parameters(self):
        tree = {"w": self.own((3,)), "layers": [{"b": jnp.float32(self.rank)}, None], "step": self.rank}
        got = hvd.broadcast_parameters(tree, root_rank=1)
        self.same(got["w"], self.of_rank(1, (3,)))
        self.assertEqual((float(got["layers"][0]["b"]), got["layers"][1], int(got["step"])), (1.0, None, 1))

    def test_refusals(self):
        with self.assertRaisesRegex(ValueError, "key_data"):
            hvd.allreduce(jax.random.key(0))
        with self.assertRaisesRegex(ValueError, "give splits"):
            hvd.alltoall(jnp.ones(self.size + 1))
        with self.assertRaisesRegex(ValueError, "not known before"):
            jax.jit(lambda x: hvd.alltoall(x, splits=[1] * self.size))(jnp.ones(self.size))
        with self.assertRaisesRegex(ValueError, "call it once"):
            jax.jit(hvd.broadcast_parameters)({"w": jnp.ones(2)})


class Programs(Case):
    def test_names_and_not_order(self):
        """Each rank has its operations in a different order, within a program and between programs."""

        def one(x, first, second):
            a = hvd.allreduce(x, name=f"order.{first}", op=hvd.Sum)
            b = hvd.allreduce(2 * x, name=f"order.{second}", op=hvd.Sum)
            return {first: a, second: b}

        turned = ("b", "a") if self.rank == 0 else ("a", "b")
        for size in (4, 100_000):
            # a and b are summed by the names that ranks gave them: 1 x of some ranks and 2 x of the others.
            result = jax.jit(lambda x: one(x, *turned))(jnp.ones(size))
            self.same(result["b"], np.full(size, 1 + 2 * (self.size - 1), "f4"))
            self.same(result["a"], np.full(size, 2 + (self.size - 1), "f4"))

    def test_program_after_program(self):
        add = jax.jit(lambda x: hvd.allreduce(x, name="again", op=hvd.Sum))
        x = jnp.ones(1000)
        for _ in range(50):
            x = add(x) / self.size
        results = [add(jnp.full(1000, i, "float32")) for i in range(50)]  # without waiting in between
        self.same(x, np.ones(1000, "f4"))
        for i, result in enumerate(results):
            self.same(result, np.full(1000, i * self.size, "f4"))

    def test_scan_and_while(self):
        def body(total, x):
            total = total + hvd.allreduce(x, name="scan", op=hvd.Sum)
            return total, hvd.allgather(total[:1], name="scan.gather")

        total, rows = jax.jit(lambda xs: jax.lax.scan(body, jnp.zeros(3), xs))(jnp.ones((5, 3)) * (self.rank + 1))
        each = self.size * (self.size + 1) / 2
        self.same(total, np.full(3, 5 * each, "f4"))
        self.same(rows, np.outer(np.arange(1, 6) * each, np.ones(self.size)).astype("f4"))
        loop = jax.jit(lambda x: jax.lax.fori_loop(0, 4, lambda _, x: hvd.allreduce(x, name="loop", op=hvd.Sum), x))
        self.same(loop(jnp.ones(2)), np.full(2, self.size**4, "f4"))

    def test_vmap_is_one_operation(self):
        batch = self.own((4, 6))
        every = self.of_all((4, 6))
        self.same(
            jax.vmap(lambda x: hvd.allreduce(x, name="v.sum", op=hvd.Sum))(batch), functools.reduce(np.add, every)
        )
        gathered = jax.jit(jax.vmap(lambda x: hvd.allgather(x, name="v.gather"), in_axes=1, out_axes=1))(batch)
        self.same(gathered, np.concatenate(every))
        cast = jax.vmap(jax.vmap(lambda x: hvd.broadcast(x, 1, name="v.cast")))(batch)
        self.same(cast, every[1])
        shape = (4, 2 * self.size)
        part = jax.vmap(lambda x: hvd.reducescatter(x, name="v.scatter", op=hvd.Sum))(self.own(shape))
        total = functools.reduce(np.add, self.of_all(shape))
        own = slice(2 * self.rank, 2 * self.rank + 2)
        self.same(part, total[:, own])

    def test_checkpoint_and_conditions(self):
        remade = jax.jit(jax.grad(jax.checkpoint(lambda x: (hvd.allreduce(x, name="remat", op=hvd.Sum) ** 2).sum())))
        x = jnp.ones(3)
        self.close(remade(x), np.full(3, 2.0 * self.size * self.size))
        either = jax.jit(
            lambda flag, x: jax.lax.cond(flag, lambda x: hvd.allreduce(x, name="cond", op=hvd.Sum), lambda x: x, x)
        )
        self.same(either(True, x), np.full(3, self.size, "f4"))
        self.same(either(False, x), np.ones(3, "f4"))

    def test_unnamed_meet_by_count(self):
        f = jax.jit(lambda x: hvd.allreduce(hvd.allreduce(x, op=hvd.Sum), op=hvd.Sum))
        self.same(f(jnp.ones(2)), np.full(2, self.size**2, "f4"))
        self.same(hvd.allreduce(jnp.ones(2), op=hvd.Sum), np.full(2, self.size, "f4"))

    def test_forward_mode_is_refused(self):
        with self.assertRaisesRegex(TypeError, "custom_vjp"):
            jax.jvp(lambda x: hvd.allreduce(x, name="forward"), (jnp.ones(2),), (jnp.ones(2),))


class Gradients(Case):
    """Compares with differences of the ranks' losses: of their sum, or by Horovod's convention of their mean."""

    def differences(self, total, values, step=1e-2):
        """Returns the differences of `total(values of all ranks)` by this rank's own values, in double."""
        values = [np.asarray(one, np.float64) for one in values]
        gradient = np.zeros_like(values[self.rank])
        for at in np.ndindex(gradient.shape):
            parts = []
            for sign in (1, -1):
                moved = [one.copy() for one in values]
                moved[self.rank][at] += sign * step
                parts.append(total(moved))
            gradient[at] = (parts[0] - parts[1]) / (2 * step)
        return gradient

    def weights(self, rank, shape):
        return np.asarray(self.of_rank(rank + 50, shape) / 100, np.float64)

    def check(self, name, operation, shape, results, scale=1.0):
        """`results(values)`: each rank's result, in NumPy. A rank's loss is its weights times its result, squared."""
        every = [one / 100 for one in self.of_all(shape)]

        def total(values):
            got = results(values)
            return scale * sum(float(np.sum(self.weights(r, got[r].shape) * got[r] ** 2)) for r in range(self.size))

        def loss(x):
            got = operation(x)
            return (self.weights(self.rank, got.shape).astype("f4") * got**2).sum()

        expected = self.differences(total, every)
        own = jnp.asarray(every[self.rank])
        for label, gradient in (("now", jax.grad(loss)), ("jit", jax.jit(jax.grad(loss)))):
            with self.subTest(name, how=label):
                self.close(gradient(own), expected, 2e-3)

    def test_allreduce(self):
        n = self.size

        def fold(op):
            return lambda values: [functools.reduce(op, values)] * n

        self.check("sum", lambda x: hvd.allreduce(x, name="g.sum", op=hvd.Sum), (4,), fold(np.add))
        self.check("mean", lambda x: hvd.allreduce(x, name="g.mean"), (4,), lambda values: [sum(values) / n] * n)
        self.check("max", lambda x: hvd.allreduce(x, name="g.max", op=hvd.Max), (4,), fold(np.maximum))
        self.check("min", lambda x: hvd.allreduce(x, name="g.min", op=hvd.Min), (4,), fold(np.minimum))
        self.check("product", lambda x: hvd.allreduce(x, name="g.product", op=hvd.Product), (4,), fold(np.multiply))
        self.check("factors", lambda x: hvd.allreduce(x, name="g.factors", op=hvd.Sum, prescale_factor=0.5,
                                                      postscale_factor=3.0), (4,),
                   lambda values: [sum(values) * 1.5] * n)  # fmt: skip

    def test_gather_broadcast_scatter(self):
        n = self.size
        self.check(
            "gather", lambda x: hvd.allgather(x, name="g.gather"), (2, 2), lambda v: [np.concatenate(v)] * n, 1 / n
        )
        self.check("broadcast", lambda x: hvd.broadcast(x, 1, name="g.cast"), (3,), lambda v: [v[1]] * n, 1 / n)
        self.check("all to all", lambda x: hvd.alltoall(x, name="g.all"), (n, 2),
                   lambda v: [np.stack([one[r] for one in v]) for r in range(n)])  # fmt: skip
        # Horovod's gradients of sums have the number of ranks as a factor.
        self.check("scatter", lambda x: hvd.reducescatter(x, name="g.scatter", op=hvd.Sum), (n + 1, 2),
                   lambda v: np.array_split(sum(v), n), n)  # fmt: skip

    def test_uneven_gather_outside_of_jit(self):
        rows = self.rank + 1
        gradient = jax.grad(lambda x: (hvd.allgather(x, name="g.uneven") ** 2).sum())(jnp.full((rows,), float(rows)))
        self.close(gradient, np.full(rows, 2.0 * rows))

    def test_integers_have_none(self):
        def loss(x, counts):
            total, all_counts = hvd.grouped_allreduce([x, counts], name="g.mixed", op=hvd.Sum)
            return total.sum() * all_counts.sum()

        gradient = jax.jit(jax.grad(loss))(jnp.ones(2), jnp.array([1, 2]))
        self.close(gradient, np.full(2, 3.0 * self.size * self.size))


class Training(Case):
    def setUp(self):
        super().setUp()
        self.parameters = hvd.broadcast_parameters(
            {
                "layers": [
                    {"w": self.own((4, 8)) / 100, "b": jnp.zeros(8)},
                    {"w": self.own((8, 1)) / 100, "b": jnp.zeros(1)},
                ]
            }
        )
        self.batches = [
            (self.of_rank(r + 9, (16, 4)) / 100, self.of_rank(r + 5, (16, 1)) / 100) for r in range(self.size)
        ]

    @staticmethod
    def loss(parameters, x, y):
        for layer in parameters["layers"]:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return ((x - y) ** 2).mean()

    def train(self, gradients_of, batch, steps=5):
        parameters = self.parameters

        @jax.jit
        def step(parameters, x, y):
            value, gradients = gradients_of(parameters, x, y)
            return jax.tree_util.tree_map(lambda p, g: p - 0.1 * g, parameters, gradients), value

        for _ in range(steps):
            parameters, value = step(parameters, *batch)
        return parameters, value

    def test_as_one_process_with_the_whole_batch(self):
        whole = tuple(np.concatenate(parts) for parts in zip(*self.batches))
        expected, _ = self.train(jax.value_and_grad(self.loss), whole)
        got, _ = self.train(hvd.value_and_grad(self.loss), self.batches[self.rank])
        for mine, wanted in zip(jax.tree_util.tree_leaves(got), jax.tree_util.tree_leaves(expected)):
            self.close(mine, wanted, 1e-6)
        for other in hvd.allgather_object([np.asarray(leaf).tobytes() for leaf in jax.tree_util.tree_leaves(got)]):
            self.assertEqual(other, [np.asarray(leaf).tobytes() for leaf in jax.tree_util.tree_leaves(got)])

    def test_without_reduction_they_differ(self):
        """Shows that the test above can fail."""
        got, _ = self.train(jax.value_and_grad(self.loss), self.batches[self.rank])
        every = hvd.allgather_object([np.asarray(leaf).tobytes() for leaf in jax.tree_util.tree_leaves(got)])
        self.assertNotEqual(every[0], every[1])

    def test_grad_and_auxiliary_values(self):
        x, y = self.batches[self.rank]
        plain, same = (
            hvd.grad(self.loss)(self.parameters, x, y),
            hvd.value_and_grad(self.loss)(self.parameters, x, y)[1],
        )
        for a, b in zip(jax.tree_util.tree_leaves(plain), jax.tree_util.tree_leaves(same)):
            self.same(a, b)
        gradients, extra = hvd.grad(lambda p, x, y: (self.loss(p, x, y), "seen"), has_aux=True, name="aux")(
            self.parameters, x, y
        )
        self.assertEqual(extra, "seen")
        self.same(jax.tree_util.tree_leaves(gradients)[0], jax.tree_util.tree_leaves(plain)[0])

    def test_compression(self):
        """Values sent have the type's precision: 1 + 2^-9 is 1 in bfloat16. Integers stay as they are."""
        values = [jnp.full(3, 1 + 2.0**-9), jnp.full(3, 257, jnp.int32)]
        expected = {"none": 1 + 2.0**-9, "bf16": 1.0, "fp16": 1 + 2.0**-9}
        for run in (lambda f: f, jax.jit):
            for name, value in expected.items():
                reduce = run(functools.partial(hvd.reduce_gradients, names=["half", "whole"], op=hvd.Sum,
                                               compression=getattr(hvd.Compression, name)))  # fmt: skip
                half, whole = reduce(values)
                self.assertEqual((half.dtype, whole.dtype), (jnp.float32, jnp.int32))
                self.same(half, np.full(3, self.size * value, np.float32))
                self.same(whole, np.full(3, self.size * 257, np.int32))
        x, y = self.batches[self.rank]
        _, plain = hvd.value_and_grad(self.loss, name="plain")(self.parameters, x, y)
        _, sent = jax.jit(hvd.value_and_grad(self.loss, name="sent", compression=hvd.Compression.fp16))(self.parameters, x, y)
        for a, b in zip(jax.tree_util.tree_leaves(plain), jax.tree_util.tree_leaves(sent)):
            np.testing.assert_allclose(a, b, rtol=5e-3, atol=1e-3)

    def test_names_come_from_paths(self):
        """Ranks whose trees have a different order of insertion still match leaf by leaf."""
        tree = {"b": jnp.ones(3) * self.rank, "a": jnp.full(3, 10.0)}
        if self.rank == 0:
            tree = dict(reversed(tree.items()))
        mean = hvd.reduce_tree(tree)
        self.close(mean["b"], np.full(3, (self.size - 1) / 2))
        self.close(mean["a"], np.full(3, 10.0))

    def test_reduce_gradients(self):
        for run in (lambda f: f, jax.jit):
            reduce = run(lambda gradients: hvd.reduce_gradients(gradients, ["one", "two"], op=hvd.Sum, postscale=0.5))
            one, two = reduce([jnp.ones(3), jnp.ones((2, 2), jnp.int32) * 2])
            self.close(one, np.full(3, self.size / 2))
            self.same(two, np.full((2, 2), self.size, np.int32))
        with self.assertRaisesRegex(ValueError, "2 gradients and 1 names"):
            hvd.reduce_gradients([jnp.ones(1), jnp.ones(1)], ["one"])


if __name__ == "__main__":
    unittest.main()
