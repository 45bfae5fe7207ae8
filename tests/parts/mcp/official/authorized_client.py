"""Authorizes the client of the conformance suite, with the code of the bus's helper and a user who says yes.

The tokens stay in memory. Which grant a scenario wants is told by its name and by what the suite says beside the URL.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

import aiohttp
import httpx2
from mcp.client.auth import OAuthClientProvider, OAuthFlowError
from mcp.client.auth.exceptions import OAuthRegistrationError, OAuthTokenError
from mcp.client.auth.extensions.client_credentials import (
    ClientCredentialsOAuthProvider,
    PrivateKeyJWTOAuthProvider,
    SignedJWTParameters,
)
from mcp.client.auth.extensions.identity_assertion import IdentityAssertionOAuthProvider
from mcp.shared.auth import AuthorizationCodeResult, OAuthClientInformationFull

from toolbus.parts.mcp.client.oauth import StoredProvider, TokenStore, authorize
from toolbus.parts.mcp.client.transport import Challenge, NeedsLogin

CALLBACK = "http://localhost:3000/callback"
CLIENT_METADATA = "https://conformance-test.local/client-metadata.json"


class Authorization:
    """Gets a token as the scenario wants it."""

    def __init__(self, url: str, provider: OAuthClientProvider) -> None:
        self._url = url
        self._provider = provider
        self._header = ""

    async def header(self) -> str:
        return self._header

    async def renew(self, challenge: Challenge) -> bool:
        try:
            self._header = await authorize(self._provider, self._url, challenge)
        except (OAuthFlowError, OAuthRegistrationError, OAuthTokenError, httpx2.HTTPError) as error:
            raise NeedsLogin(f"no token: {error}") from error
        return True

    async def close(self) -> None:
        """Has nothing to end."""


class User:
    """Opens the page of an authorization server and agrees: the suite redirects at once."""

    def __init__(self) -> None:
        self._answer: dict[str, list[str]] = {}

    async def show(self, url: str) -> None:
        async with aiohttp.ClientSession() as session, session.get(url, allow_redirects=False) as response:
            self._answer = parse_qs(urlsplit(response.headers["Location"]).query)

    async def wait(self) -> AuthorizationCodeResult:
        fields = {name: values[0] for name, values in self._answer.items() if name in ("code", "state", "iss")}
        return AuthorizationCodeResult.model_validate(fields)


async def authorization(url: str, context: Mapping[str, Any]) -> Authorization:
    """Returns what authorizes requests in the scenario that is played."""
    return Authorization(url, await _provider(url, os.environ["MCP_CONFORMANCE_SCENARIO"], context))


async def _provider(url: str, scenario: str, context: Mapping[str, Any]) -> Any:
    store = TokenStore(None, url)
    if scenario == "auth/client-credentials-basic":
        issuer = await _issuer_of(url)
        return ClientCredentialsOAuthProvider(url, store, context["client_id"], context["client_secret"], issuer=issuer)
    if scenario == "auth/client-credentials-jwt":
        signed = SignedJWTParameters(
            issuer=context["client_id"],
            subject=context["client_id"],
            signing_key=context["private_key_pem"],
            signing_algorithm=context["signing_algorithm"],
        )
        return PrivateKeyJWTOAuthProvider(
            url, store, context["client_id"], signed.create_assertion_provider(), issuer=await _issuer_of(url)
        )
    if scenario == "auth/enterprise-managed-authorization":

        async def id_jag(audience: str, resource: str) -> str:
            return await _exchanged(context, audience, resource)

        return IdentityAssertionOAuthProvider(
            url, store, context["client_id"], context["client_secret"], await _issuer_of(url), id_jag,
            token_endpoint_auth_method="client_secret_basic",
        )  # fmt: skip
    user = User()
    if "client_id" in context:
        await store.set_client_info(
            OAuthClientInformationFull.model_validate(
                {
                    "client_id": context["client_id"],
                    "client_secret": context.get("client_secret"),
                    "redirect_uris": [CALLBACK],
                    "token_endpoint_auth_method": "client_secret_basic" if "client_secret" in context else "none",
                    "issuer": context.get("issuer"),
                }
            )
        )
    return StoredProvider(url, store, CALLBACK, user.show, user.wait, client_metadata_url=CLIENT_METADATA)


async def _issuer_of(url: str) -> str:
    """Returns the issuer that a server names: where these grants are used, an operator configures it."""
    parts = urlsplit(url)
    metadata = urlunsplit((parts.scheme, parts.netloc, f"/.well-known/oauth-protected-resource{parts.path}", "", ""))
    async with aiohttp.ClientSession() as session, session.get(metadata) as response:
        return str((await response.json())["authorization_servers"][0])


async def _exchanged(context: Mapping[str, Any], audience: str, resource: str) -> str:
    """Exchanges the token of the identity provider for one that the authorization server takes (RFC 8693)."""
    form = {
        "grant_type": "urn:ietf:params:oauth:grant-type:token-exchange",
        "requested_token_type": "urn:ietf:params:oauth:token-type:id-jag",
        "audience": audience,
        "resource": resource,
        "subject_token": context["idp_id_token"],
        "subject_token_type": "urn:ietf:params:oauth:token-type:id_token",
        "client_id": context["idp_client_id"],
    }
    async with aiohttp.ClientSession() as session, session.post(context["idp_token_endpoint"], data=form) as response:
        return str((await response.json())["access_token"])
