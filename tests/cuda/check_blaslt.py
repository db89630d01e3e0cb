"""The stand-in for cuBLASLt itself: right products, bits that vary where the library's may, and
mistakes of programs stopped or refused."""

from ctypes import c_int

import numpy as np

import host
from cases import case, main, mistake, refused
from device import from_bf16, to_bf16


class Multiplier:
    """x (M, 64) · wᵀ (N, 64), bf16, on the device by cuBLASLt."""

    def __init__(self, folder, m=256, n=24, output=host.FLOAT32, **options):
        self.host, self.blas = host.Host(folder), host.Blas(folder)
        rng = np.random.default_rng(3)
        self.m, self.n, self.output, self.options = m, n, output, options
        self.x, self.w = [to_bf16(rng.standard_normal((r, 64))) for r in (m, n)]
        self.stream = self.host.stream()
        self.at = [self.host.allocate(x.nbytes) for x in (self.w, self.x)]
        for at, numbers in zip(self.at, (self.w, self.x)):
            self.host.upload(at, numbers, self.stream)
        self.out = self.host.allocate(m * n * 4)
        self.workspace = self.host.allocate(8 << 20), 8 << 20

    def product(self, m=None):
        types = host.BFLOAT16, self.output
        return self.blas.product(m or self.m, self.n, 64, types, **self.options)

    def algorithms(self, m=None, **preference):
        return self.blas.algorithms(self.product(m), **preference)

    def multiply(self, algorithm, m=None, out=None, **named):
        arguments = algorithm, *self.at, out or self.out, self.stream
        self.blas.multiply(self.product(m), *arguments, workspace=self.workspace, **named)

    def rows(self, algorithm, m=None, **named):
        self.multiply(algorithm, m, **named)
        dtype = np.float32 if self.output == host.FLOAT32 else np.uint16
        return self.host.read(self.out, (m or self.m, self.n), dtype, self.stream)

    def exact(self):
        return from_bf16(self.x).astype(np.float64) @ from_bf16(self.w).T.astype(np.float64)


@case()
def products_are_right(folder):
    p = Multiplier(folder)
    [best, *_] = p.algorithms()
    once = p.rows(best)
    assert np.abs(once - p.exact()).max() < 1e-4
    assert np.abs(p.rows(best, beta=1.0) - 2 * p.exact()).max() < 2e-4


@case()
def products_round_to_bf16_and_take_a_bias(folder):
    p = Multiplier(folder, output=host.BFLOAT16)
    bias = to_bf16(np.arange(24))
    p.options["bias"] = p.host.allocate(bias.nbytes)
    p.host.upload(p.options["bias"], bias, p.stream)
    got = from_bf16(p.rows(p.algorithms()[0]))
    assert np.abs(got - p.exact() - np.arange(24)).max() < 0.2


@case()
def tf32_is_told_from_fp32(folder):
    h, blas = host.Host(folder), host.Blas(folder)
    stream, types = h.stream(), (host.FLOAT32, host.FLOAT32)
    x = np.full((128, 8), 1 + 2.0**-20, np.float32)
    at, w, out = [h.allocate(4 * 128 * 8) for _ in range(3)]
    h.upload(at, x, stream)
    h.upload(w, x[:8], stream)
    for compute, expected in ((host.COMPUTE_32F, (1 + 2.0**-20) ** 2), (host.COMPUTE_TF32, 1)):
        product = blas.product(128, 8, 8, types, compute)
        blas.multiply(product, blas.algorithms(product)[0], w, at, out, stream)
        got = h.read(out, (128, 8), stream=stream)
        assert np.abs(got / 8 - expected).max() < 1e-7


@case()
def algorithms_by_size(folder):
    p = Multiplier(folder, m=2048)
    names = lambda found: [p.blas.id_of(a) for a in found]
    assert names(p.algorithms()) == [66, 67, 71]
    assert names(p.algorithms(m=128)) == [67, 71]
    assert names(p.algorithms(workspace=0)) == [67, 71]
    assert names(p.algorithms(reductions=7)) == [20, 66, 67, 71]
    wide = p.algorithms()[0]
    refused(15, p.blas.check, p.product(128), wide)
    refused(15, p.multiply, wide, 128)
    other = p.blas.product(2048, 48, 64, (host.BFLOAT16, host.FLOAT32))
    refused(15, p.blas.check, other, p.algorithms()[1])


def row_bits_vary(folder, rank=0, m=256, fewer=128, **preference):
    p = Multiplier(folder, m=m)
    algorithm = p.algorithms(**preference)[rank]
    return p.rows(algorithm)[:64].tobytes() != p.rows(algorithm, fewer)[:64].tobytes()


@case()
def row_bits_stay_in_whole_tiles(folder):
    assert not row_bits_vary(folder)


@case()
def row_bits_vary_when_k_is_split(folder):
    assert row_bits_vary(folder, reductions=7)


@case()
def row_bits_vary_without_padding(folder):
    assert row_bits_vary(folder, fewer=100)


@case()
def row_bits_vary_in_unaligned_columns(folder):
    p = Multiplier(folder, n=23)
    [algorithm] = p.algorithms()
    assert p.rows(algorithm)[:64].tobytes() != p.rows(algorithm, 128)[:64].tobytes()


@case(algorithms="varying")
def row_bits_vary_where_asked(folder):
    assert row_bits_vary(folder)


@case(algorithms="refusing")
def few_rows_refused_where_asked(folder):
    p = Multiplier(folder, m=1024)
    [algorithm, *_] = p.algorithms()
    refused(15, p.blas.check, p.product(128), algorithm)


@case(algorithms="absent")
def no_algorithm_where_asked(folder):
    refused(15, Multiplier(folder).algorithms)


@mistake("is no multiple of the 256 bytes the preference promised")
def alignment_promised_by_default(folder):
    p = Multiplier(folder)
    [algorithm, *_] = p.algorithms(alignment=0)
    p.multiply(algorithm, 128, out=p.out + 16)


@mistake("is no multiple of the 16 bytes the preference promised")
def unaligned_product(folder):
    p = Multiplier(folder)
    p.multiply(p.algorithms()[0], 128, out=p.out + 4)


@mistake("D of a product: 24576 bytes from byte 16")
def product_past_the_end(folder):
    p = Multiplier(folder)
    p.multiply(p.algorithms()[0], out=p.out + 16)


@case()
def bias_in_another_type_than_the_output(folder):
    p = Multiplier(folder, output=host.BFLOAT16, bias=1 << 20)
    product = p.product()
    p.blas.set("cublasLtMatmulDescSetAttribute", product[0], 26, c_int(host.FLOAT32))
    refused(15, p.blas.algorithms, product)


@mistake("epilogue 32 of cublasLtEpilogue_t")
def unknown_epilogue(folder):
    p = Multiplier(folder)
    p.blas.set("cublasLtMatmulDescSetAttribute", p.product()[0], 7, c_int(32))


@case(driver=12040)
def library_newer_than_the_driver(folder):
    host.Host(folder)
    refused(1, host.Blas, folder, 13)
    host.Blas(folder, 12)


if __name__ == "__main__":
    main()
