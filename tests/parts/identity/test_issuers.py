"""Tests tokens of other issuers: whom they prove, what is refused, and when keys are fetched."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from tests.parts.identity.played_issuer import NAME, RSA, PlayedIssuer
from tests.support.waiting import until
from toolbus.bus.access.identity import Identity, Principal, Scopes
from toolbus.common.reader import Reader
from toolbus.errors import SetupError, Unauthenticated
from toolbus.parts.identity.issuers import MAX_VERIFIED, Issuers
from toolbus.parts.identity.settings import Issuer, read_issuers


@pytest.fixture
def login() -> PlayedIssuer:
    return PlayedIssuer()


async def refusal(login: PlayedIssuer, token: str) -> str:
    with pytest.raises(Unauthenticated) as caught:
        await login.issuers.identity_of(token)
    assert len(token) < 20 or token[-20:] not in str(caught.value)
    return str(caught.value)


async def test_a_token_has_a_name_of_its_own_and_the_scopes_of_its_group(login: PlayedIssuer) -> None:
    ann = await login.issuers.identity_of(login.token())
    assert (ann.name, ann.key, ann.how, ann.expires) == ("chat/ann", "login.example", "jwt", login.now + 3600)
    assert ann.scopes is login.identities["chat"]
    both = await login.issuers.identity_of(login.token("e", sub="bob@example", groups=["bots", "x", "ops"]))
    assert both.name == "operator/bob@example"
    assert both.scopes is login.identities["operator"]


async def test_clients_of_one_name_at_two_issuers_are_two_identities_also_on_one_host() -> None:
    realms = [f"{NAME}/realms/{realm}" for realm in "ab"]
    played = {each: PlayedIssuer() for each in (NAME, *realms)}
    login = played[NAME]

    async def fetch(url: str) -> bytes:
        return played[url.removesuffix("/keys")].jwks()

    records = [
        Issuer(each, "toolbus", f"{each}/keys", {"bots": "chat", "ops": f"ops-{i}"}) for i, each in enumerate(played)
    ]
    login.identities |= {f"ops-{i}": Scopes() for i in range(3)}
    issuers = Issuers(records, lambda: login.identities, fetch, login.clock, login.clock)
    proven = [await issuers.identity_of(login.token(iss=each)) for each in played]
    assert [each.name for each in proven] == [
        "chat/ann",
        "chat@login.example%2Frealms%2Fa/ann",
        "chat@login.example%2Frealms%2Fb/ann",
    ]
    assert len({each.key for each in proven}) == 3
    assert len({Principal("host", identity=each).account for each in proven}) == 3
    assert all(issuers.current(each).scopes is login.identities["chat"] for each in proven)
    own = await issuers.identity_of(login.token(iss=realms[1], groups=["ops"]))
    assert own.name == "ops-2/ann"  # no other issuer proves it
    posing = await issuers.identity_of(login.token(sub="ann", iss=NAME, groups=["ops"]))
    assert posing.name == "ops-0/ann"
    del played[realms[0]].keys["r"]  # dropped there, and there only
    login.now += 3601
    ended = [each for each in proven if each.key.endswith("Fa")]
    await until(lambda: not any(_holds_with(issuers, each) for each in ended), "the end of the session")
    assert all(_holds_with(issuers, each) for each in proven if each not in ended)
    await issuers.close()


def _holds_with(issuers: Issuers, session: Identity) -> bool:
    try:
        issuers.current(session)
    except Unauthenticated as problem:
        return "does not publish any more" not in str(problem)
    return True


async def test_a_verified_token_is_the_same_identity_and_its_keys_are_fetched_once(login: PlayedIssuer) -> None:
    token = login.token()
    first = await login.issuers.identity_of(token)
    login.answers = False
    assert await login.issuers.identity_of(token) is first
    assert login.fetches == 1


async def test_scopes_that_changed_are_those_of_old_tokens_too(login: PlayedIssuer) -> None:
    token = login.token()
    before = await login.issuers.identity_of(token)
    login.identities["chat"] = Scopes()
    after = await login.issuers.identity_of(token)
    assert after.scopes is login.identities["chat"]
    assert login.issuers.current(before).scopes is login.identities["chat"]
    assert login.issuers.current(after) is after
    del login.identities["chat"]
    assert "gets its scopes from identity 'chat', which keys.toml does not have" in await refusal(login, token)
    with pytest.raises(Unauthenticated, match="gets its scopes from identity 'chat'"):
        login.issuers.current(before)


async def test_the_keys_are_fetched_every_hour_where_only_known_tokens_come_and_a_dropped_one_ends_sessions(
    login: PlayedIssuer,
) -> None:
    token = login.token("e", exp=login.now + 86_400)
    session = await login.issuers.identity_of(token)
    del login.keys["e"]
    login.now += 3601
    assert login.issuers.current(session) is session
    await until(lambda: login.fetches == 2, "the keys")
    await until(lambda: not _holds(login, session), "the end of the session")
    with pytest.raises(Unauthenticated, match="which its issuer login"):
        login.issuers.current(session)
    assert "signed with key 'e', which its issuer" in await refusal(login, token)


def _holds(login: PlayedIssuer, session: Identity) -> bool:
    try:
        login.issuers.current(session)
    except Unauthenticated:
        return False
    return True


async def test_a_session_of_a_token_without_a_key_id_goes_on(login: PlayedIssuer) -> None:
    del login.keys["e"]
    token = login.token("", RSA)
    session = await login.issuers.identity_of(token)
    assert login.issuers.current(session) is session
    assert await login.issuers.identity_of(token) is session


@pytest.mark.parametrize("claims", [{"exp": 10**400}, {"exp": -(10**30)}, {"nbf": 10**400}])
async def test_a_time_beyond_all_clocks_is_refused_like_any_other(login: PlayedIssuer, claims: dict[str, Any]) -> None:
    assert await refusal(login, login.token(**claims))


@pytest.mark.parametrize("header", [{"kid": "\ud800"}, {"kid": "r", "alg": "\ud800"}, {"kid": ["r"], "alg": "RS256"}])
async def test_a_header_that_no_text_can_hold_is_refused_with_a_text_that_can_be_sent(
    login: PlayedIssuer, header: dict[str, Any]
) -> None:
    def part(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    why = await refusal(login, f"{part({'alg': 'RS256', 'typ': 'JWT', **header})}.{part({'iss': NAME})}.AAAA")
    why.encode()


async def test_tokens_of_a_key_end_when_its_issuer_drops_the_key(login: PlayedIssuer) -> None:
    token = login.token("e")
    await login.issuers.identity_of(token)
    del login.keys["e"]
    login.now += 30
    assert "signed with key 'x', which its issuer" in await refusal(login, login.token("x", RSA))
    assert "signed with key 'e', which its issuer" in await refusal(login, token)


async def test_a_token_ends_when_it_expires(login: PlayedIssuer) -> None:
    token = login.token()
    ann = await login.issuers.identity_of(token)
    login.now += 3600
    said = "the token of identity 'chat/ann' (key login.example) expired on 2027-01-15: get a new one from its issuer"
    assert await refusal(login, token) == said
    with pytest.raises(Unauthenticated, match="expired on 2027-01-15"):
        login.issuers.current(ann)
    assert "login.example expired on 2027-01-15" in await refusal(login, login.token(exp=login.now, sub="bob"))


@pytest.mark.parametrize(
    ("claims", "error"),
    [
        ({"aud": "other"}, "is not for this bus: get one for audience 'toolbus'"),
        ({"aud": None}, "has no claim aud"),
        ({"exp": None}, "has no claim exp"),
        ({"exp": "soon"}, "claim exp is not a time"),
        ({"exp": float("nan")}, "claim exp is not a time"),
        ({"exp": True}, "claim exp is not a time"),
        ({"iss": "https://evil.example"}, f"is of issuer 'https://evil.example', this bus knows '{NAME}'"),
        ({"iss": None}, "is of issuer 'None'"),
        ({"nbf": 1_800_000_031}, "is not valid yet: set the clocks"),
        ({"iat": 1_800_000_031}, "is not valid yet"),
        ({"sub": None}, "the claim 'sub' of the token of issuer login.example is not a name of 1 to 128 printable"),
        ({"sub": "a\nb"}, "is not a name"),
        ({"sub": 7}, "is not a name"),
        ({"sub": "x" * 129}, "is not a name"),
        ({"groups": None}, "is in none of the groups 'ops', 'bots' (its claim 'groups')"),
        ({"groups": {"bots": 1}}, "is in none of the groups"),
    ],
)
async def test_a_token_that_is_not_for_us_is_refused_with_what_to_do(
    login: PlayedIssuer, claims: dict[str, Any], error: str
) -> None:
    assert error in await refusal(login, login.token(**claims))


async def test_clocks_may_differ_a_little(login: PlayedIssuer) -> None:
    assert (await login.issuers.identity_of(login.token(nbf=login.now + 29, iat=login.now + 29))).name == "chat/ann"


async def test_a_token_that_another_key_signed_is_refused(login: PlayedIssuer) -> None:
    stranger = rsa.generate_private_key(65537, 2048)
    assert "does not prove that issuer login.example issued it" in await refusal(login, login.token(key=stranger))


async def test_a_token_without_a_signature_is_refused(login: PlayedIssuer) -> None:
    payload = jwt.decode(login.token(), options={"verify_signature": False})
    assert "is signed with 'none', it may be signed with RS256" in await refusal(
        login, jwt.encode(payload, "", "none", headers={"kid": "r"})
    )


async def test_a_public_key_is_not_a_shared_secret(login: PlayedIssuer) -> None:
    public = RSA.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    header, payload = (
        base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=")
        for part in (
            {"alg": "HS256", "kid": "r"},
            {"iss": NAME, "aud": "toolbus", "sub": "x", "exp": 2e9, "groups": ["ops"]},
        )
    )
    signature = hmac.new(public, header + b"." + payload, hashlib.sha256).digest()
    token = b".".join((header, payload, base64.urlsafe_b64encode(signature).rstrip(b"="))).decode()
    assert "is signed with 'HS256', it may be signed with" in await refusal(login, token)


async def test_a_key_signs_with_its_own_algorithm_only(login: PlayedIssuer) -> None:
    assert "is signed with 'RS512'" in await refusal(login, login.token(algorithm="RS512"))
    assert "does not prove" in await refusal(login, login.token("e", RSA))


@given(st.data())
async def test_a_changed_token_proves_nothing(data: st.DataObject) -> None:
    login = PlayedIssuer()
    token = login.token()
    place = data.draw(st.integers(0, len(token) - 1))
    char = data.draw(st.characters(codec="ascii"))
    changed = token[:place] + char + token[place + 1 :]
    try:
        identity = await login.issuers.identity_of(changed)
    except Unauthenticated:
        return
    parts, others = token.split("."), changed.split(".")
    assert parts[:2] == others[:2]  # the last bits of base64 may differ
    assert identity.name == "chat/ann"


@given(st.text())
async def test_any_text_is_refused(text: str) -> None:
    await refusal(PlayedIssuer(), text)


async def test_a_token_that_is_too_long_is_refused_unread(login: PlayedIssuer) -> None:
    assert "has more than 8192 characters" in await refusal(login, login.token(more="x" * 8192))


async def test_few_verified_tokens_are_held(login: PlayedIssuer) -> None:
    login.keys = {"k": ed25519.Ed25519PrivateKey.generate()}
    for number in range(MAX_VERIFIED + 10):
        await login.issuers.identity_of(login.token("k", sub=f"u{number}"))
    assert repr(login.issuers) == f"<Issuers login.example verified={MAX_VERIFIED}>"


def test_issuers_are_read_from_the_configuration() -> None:
    table = {"issuer": NAME, "audience": "toolbus", "jwks": f"{NAME}/keys", "groups": {"*": "chat"}}
    (issuer,) = read_issuers(Reader([table]))
    assert issuer == Issuer(NAME, "toolbus", f"{NAME}/keys", {"*": "chat"})
    assert (issuer.host, issuer.file) == ("login.example", None)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"issuer": ""}, r"issuers\[0\]: issuer is missing: fill it in"),
        ({"jwks": "http://login.example/keys"}, "it must be https://HOST/PATH or a file"),
        ({"jwks": "https://ann:x@login.example/keys"}, "it must be https://HOST/PATH or a file"),
        ({"groups": {}}, r'groups is empty, so no token of .* proves anything: write groups = {"\*" = "NAME"}'),
        ({"groups": {"a": "b c"}}, "groups.a is 'b c', it must name an identity of keys.toml"),
        ({"algorithms": ["HS256"]}, r"issuers\[0\].algorithms\[0\] is 'HS256', it must be one of RS256"),
        ({"algorithms": []}, "it must hold some of RS256"),
        ({"audiences": "x"}, r"unknown key issuers\[0\].audiences \(did you mean audience\?\)"),
    ],
)
def test_a_slip_in_the_configuration_is_refused_with_its_place(change: dict[str, Any], error: str) -> None:
    table = {"issuer": NAME, "audience": "toolbus", "jwks": f"{NAME}/keys", "groups": {"*": "chat"}, **change}
    with pytest.raises(SetupError, match=error):
        read_issuers(Reader([table], path="issuers", loc=("issuers",)))


def test_an_issuer_has_one_record() -> None:
    table = {"issuer": NAME, "audience": "toolbus", "jwks": f"{NAME}/keys", "groups": {"*": "chat"}}
    with pytest.raises(SetupError, match="is configured twice: keep one record"):
        read_issuers(Reader([table, table], path="issuers", loc=("issuers",)))


async def test_all_users_of_an_issuer_can_have_one_identity() -> None:
    login = PlayedIssuer(Issuer(NAME, "toolbus", f"{NAME}/keys", {"ops": "operator", "*": "chat"}, name="email"))
    token = login.token(groups=None, email="ann@example")
    assert (await login.issuers.identity_of(token)).name == "chat/ann@example"
