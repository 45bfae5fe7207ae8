"""Generates URLs that are nearly valid, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

HOSTS = st.sampled_from(
    ["127.0.0.1", "localhost", "LOCALHOST", "[::1]", "[::ffff:127.0.0.1]", "[0::1]", "127.1", "evil.com", "[::]", ""]
)
CHARACTERS = st.sampled_from(list("@:/\\?#[]%.\t\n ;&+－＠。１ſ\u200d\ud800\x00")) | st.characters()
URLS = st.builds(
    lambda scheme, info, host, port, rest: scheme + info + host + port + rest,
    st.sampled_from(["http://", "https://", "HTTP://", "http:/", "//", ""]),
    st.sampled_from(["", "u@", "u:p@", ":@", "127.0.0.1@", "evil.com:80@"]),
    HOSTS,
    st.sampled_from(["", ":", ":80", ":9000", ":65535", ":65536"]),
    st.one_of(st.just(""), st.text().map(lambda path: f"/{path}"), st.sampled_from(["?a=b", "#@evil.com/", "/..//@"])),
)


@st.composite
def mutated_urls(draw: st.DrawFn) -> str:
    """URLs of which up to two characters were changed."""
    url: str = draw(URLS)
    for _ in range(draw(st.integers(0, 2))):
        where = draw(st.integers(0, len(url)))
        url = url[:where] + draw(CHARACTERS) + url[where + draw(st.integers(0, 1)) :]
    return url
