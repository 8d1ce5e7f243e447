"""The parts that models are made of, as Python."""

FEATURES = 8  # features everywhere, so that any piece may be left out
SECOND = "nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))"

CLASSES = {
    "Words": """
class Words(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.table = nn.EmbeddingBag(12, 8, mode="mean", sparse=sparse)

    def forward(self, x):
        return self.table((x.detach().float().nan_to_num().clamp(-9, 9) * 5).long() % 12)
""",
    "Gate": """
class Gate(nn.Module):
    def __init__(self, on=True):
        super().__init__()
        self.inner, self.on = nn.Linear(8, 8), on

    def forward(self, x):
        return x + self.inner(x) if self.on else x
""",
    "Scale": """
class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.1)
        return (x - 0.1 * self.mean) * self.by
""",
    "Recurrent": """
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x):
        return self.cell(x, torch.zeros_like(x))
""",
    "Attention": """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x.view(-1, 2, 4)).flatten(1)
""",
    "Again": """
class Again(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
""",
    "Late": """
class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = None

    def forward(self, x):
        if self.by is None:
            self.by = nn.Parameter(torch.ones(8, dtype=x.dtype))
        return x * self.by
""",
    "Complex": """
class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.view_as_complex(torch.randn(8, 2)))

    def forward(self, x):
        return (x * self.by).real + (x * self.by).imag
""",
}
MAKES = {
    "Linear": "nn.Linear(8, 8)", "BatchNorm": "nn.BatchNorm1d(8)", "LayerNorm": "nn.LayerNorm(8)", "Dropout": "nn.Dropout(0.3)",
    "Tanh": "nn.Tanh()", "GELU": "nn.GELU()", "Tied": "nn.Linear(8, 8)", "Lazy": "nn.LazyLinear(8)",
    "Conv": "nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 2, 3, padding=1), nn.Flatten())",
    "Spectral": "nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))",
    "WeightNorm": "nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))",
    "Recurrent": "Recurrent()", "Attention": "Attention()", "Again": "Again()", "Late": "Late()", "Complex": "Complex()",
    "Scale": "Scale()",
}  # fmt: skip
