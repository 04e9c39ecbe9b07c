"""Bodies of small networks, as tests/passes/conftest.py reads them."""

RESIDUAL = """
    a = conv(x, 4)
    n1 = bn(a)
    r = relu6(n1)
    p = maxpool(r, k=3)
    b = conv(p, 4, k=3, bias=1)
    n2 = bn(b)
    s = add(n2, p)
    u = silu(s)
    c = conv(u, 4, k=3, g=2)
    n3 = bn(c)
    out = relu(n3)
"""
DENSE = """
    c0 = conv(x, 4)
    n1 = bn(c0)
    r1 = relu(n1)
    y1 = conv(r1, 3, k=3)
    t2 = cat(c0, y1)
    n2 = bn(t2)
    r2 = relu(n2)
    y2 = conv(r2, 2, k=3)
    t3 = cat(t2, y2)
    n3 = bn(t3)
    r3 = relu(n3)
    z = conv(r3, 6)
    out = avgpool(z)
"""
