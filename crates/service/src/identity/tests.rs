//! Who is identified, with what is refused.

#![expect(clippy::disallowed_types, reason = "claims and keys of these tests")]

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, SanType};
use redeliver_runtime::Config;
use redeliver_testkit::fuzz::{FEW, check_each};
use redeliver_testkit::jwt::{Issuer, jwks};
use redeliver_testkit::{FakeEndpoint, Reply, ensure, valid_json};
use rustls::pki_types::CertificateDer;
use serde_json::{Value, json};

use super::*;

mod names;

/// A directory with the files of an authenticator.
struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.0.path().join(name), text).unwrap();
    }

    /// An authenticator with this configuration of the section `scheduler`, in which `{dir}` is the directory.
    fn authenticator(&self, section: &str) -> Authenticator {
        let section = section.replace("{dir}", &self.0.path().display().to_string());
        let config = Config::from_yaml(&format!("scheduler: {{ {section} }}")).unwrap();
        Authenticator::new("scheduler", &config.scheduler.api(), RefusalMetrics::default()).unwrap()
    }
}

async fn with_token(authenticator: &Authenticator, token: &str) -> Result<Identity, Refusal> {
    let header = format!("Bearer {token}");
    authenticator.authenticate(Some(header.as_bytes()), &[]).await
}

async fn accepts(authenticator: &Authenticator, token: &str) {
    let identified = with_token(authenticator, token).await;
    assert!(identified.is_ok(), "{identified:?}");
}

/// Lets two checks read the changed files.
fn follow_files(authenticator: &Authenticator) {
    authenticator.check_files();
    authenticator.check_files();
}

async fn reason(authenticator: &Authenticator, token: &str) -> Reason {
    let refusal = with_token(authenticator, token).await.unwrap_err();
    assert!(!refusal.message().contains(token), "{refusal:?}");
    refusal.reason()
}

fn tokens_file(entries: &[(&str, &NewToken, &str)]) -> String {
    let entries = entries.iter().map(
        |(name, token, scope)| json!({"name": name, "sha256": token.sha256.to_string(), "scopes": [scope]}),
    );
    json!({"tokens": entries.collect::<Vec<_>>()}).to_string()
}

const SINGLE: &str = "token_file: '{dir}/token'";
const LISTED: &str = "auth: { tokens_file: '{dir}/tokens' }";

#[tokio::test]
async fn unauthenticated_callers_are_anonymous() {
    let authenticator = Files::new().authenticator("");
    let anonymous = authenticator.authenticate(None, &[]).await.unwrap();
    assert_eq!(
        (anonymous.name().as_str(), anonymous.name().is_anonymous()),
        ("anonymous", true)
    );
    assert!(anonymous.may(Area::Jobs, Verb::Write, None));
    assert!(with_token(&authenticator, "whatever").await.is_ok());
}

#[tokio::test]
async fn only_the_single_token_permits() {
    let files = Files::new();
    files.write("token", "s3cret\n");
    let authenticator = files.authenticator(SINGLE);
    let identity = with_token(&authenticator, "s3cret").await.unwrap();
    assert!(identity.may(Area::DeadLetters, Verb::Read, None));
    assert!(
        authenticator
            .authenticate(Some(b"bearer s3cret"), &[])
            .await
            .is_ok()
    );
    for wrong in ["s3cre", "s3crets", "S3cret", ""] {
        let header = format!("Bearer {wrong}");
        let refused = authenticator
            .authenticate(Some(header.as_bytes()), &[])
            .await
            .unwrap_err();
        assert_eq!(refused.reason(), Reason::TokenWrong, "{wrong}");
        assert!(!refused.message().contains("s3cret"));
    }
    for malformed in [
        &b""[..],
        b"Bearer",
        b"Basic s3cret",
        b"s3cret",
        b"Bearers3cret",
        b"\xff\xff\xff\xff\xff\xff ",
    ] {
        let refused = authenticator
            .authenticate(Some(malformed), &[])
            .await
            .unwrap_err();
        assert_eq!(refused.reason(), Reason::TokenMalformed, "{malformed:?}");
    }
    let missing = authenticator.authenticate(None, &[]).await.unwrap_err();
    assert_eq!(missing.reason(), Reason::TokenMissing);
    assert_eq!(missing.challenge().as_deref(), Some("Bearer"));
}

#[tokio::test]
async fn listed_token_works_until_revoked() {
    let files = Files::new();
    let (billing, mail) = (new_token().unwrap(), new_token().unwrap());
    assert_ne!(billing.token, mail.token);
    let both = [
        ("billing", &billing, "jobs:write:billing-*"),
        ("mail", &mail, "jobs:read:mail"),
    ];
    files.write("tokens", &tokens_file(&both));
    let authenticator = files.authenticator(LISTED);
    let identity = with_token(&authenticator, &billing.token).await.unwrap();
    assert_eq!(identity.name().as_str(), "token:billing");
    assert!(
        identity
            .require(Area::Jobs, Verb::Write, Some("billing-eu"))
            .is_ok()
    );
    let denied = identity
        .require(Area::Jobs, Verb::Write, Some("mail"))
        .unwrap_err();
    assert_eq!(denied.reason(), Reason::PermissionDenied);
    assert_eq!(
        denied.message(),
        "`token:billing` may not write jobs of the application `mail`; it needs the scope jobs:write:mail"
    );
    assert_eq!(
        denied.challenge().as_deref(),
        Some("Bearer error=\"insufficient_scope\", scope=\"jobs:write:mail\"")
    );
    let all = identity.require(Area::Jobs, Verb::Read, None).unwrap_err();
    assert_eq!(all.missing_scope().as_deref(), Some("jobs:read"));

    // An invalid file revokes nothing.
    files.write("tokens", "tokens: [");
    follow_files(&authenticator);
    accepts(&authenticator, &mail.token).await;
    files.write("tokens", &tokens_file(&both[1..]));
    follow_files(&authenticator);
    assert_eq!(reason(&authenticator, &billing.token).await, Reason::TokenWrong);
    accepts(&authenticator, &mail.token).await;
}

#[tokio::test]
async fn foreign_names_are_escaped_in_messages() {
    let identity = Identity::new(CallerName::token("x"), ["jobs:read".parse().unwrap()]);
    let app = format!("a\n\"{}", "b".repeat(1_000));
    let denied = identity.require(Area::Jobs, Verb::Write, Some(&app)).unwrap_err();
    assert!(
        denied.message().len() < 400 && !denied.message().contains('\n'),
        "{denied:?}"
    );
    // The scope is left out of the challenge, because it contains a quotation mark.
    assert_eq!(
        denied.challenge().as_deref(),
        Some("Bearer error=\"insufficient_scope\"")
    );
}

fn certificate(common_name: &str, alternatives: Vec<SanType>) -> CertificateDer<'static> {
    named_certificate(Some(common_name), alternatives, &KeyPair::generate().unwrap())
}

fn named_certificate(
    common_name: Option<&str>,
    alternatives: Vec<SanType>,
    key: &KeyPair,
) -> CertificateDer<'static> {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.distinguished_name = DistinguishedName::new();
    if let Some(name) = common_name {
        params.distinguished_name.push(DnType::CommonName, name);
    }
    params.subject_alt_names = alternatives;
    params.self_signed(key).unwrap().der().clone()
}

const CERTIFICATES: &str = "tls: { cert_file: x, key_file: x, client_ca_file: x }, auth: { client_certificates: [ \
     { uri: 'spiffe://prod/ns/billing/*', scopes: ['jobs:*:billing-*'] }, \
     { dns: '*.mail.example.org', scopes: ['jobs:write:mail'] }, { cn: ops, scopes: ['*'] } ] }";

#[tokio::test]
async fn certificate_is_identified_by_names() {
    let files = Files::new();
    let authenticator = files.authenticator(CERTIFICATES);
    let uri = |text: &str| SanType::URI(text.try_into().unwrap());
    let dns = |text: &str| SanType::DnsName(text.try_into().unwrap());
    for (leaf, name, app) in [
        (
            certificate("x", vec![uri("spiffe://prod/ns/billing/sa/api")]),
            "certificate:URI=spiffe://prod/ns/billing/sa/api",
            "billing-eu",
        ),
        (
            certificate("x", vec![dns("a.mail.example.org")]),
            "certificate:DNS=a.mail.example.org",
            "mail",
        ),
        (
            certificate("ops", vec![dns("a.mail.example.org")]),
            "certificate:DNS=a.mail.example.org",
            "mail",
        ),
        (certificate("ops", Vec::new()), "certificate:CN=ops", "anything"),
    ] {
        let identity = authenticator.authenticate(None, &[leaf]).await.unwrap();
        assert_eq!(identity.name().as_str(), name);
        assert!(identity.may(Area::Jobs, Verb::Write, Some(app)));
        assert_eq!(identity.may(Area::Jobs, Verb::Read, None), name.ends_with("=ops"));
    }
    // A name of another kind does not count.
    let other = certificate(
        "spiffe://prod/ns/billing/sa/api",
        vec![dns("ops"), uri("spiffe://test/ns/billing/x")],
    );
    let refused = authenticator.authenticate(None, &[other]).await.unwrap_err();
    assert_eq!(refused.reason(), Reason::CertificateUnknown);
    assert!(refused.message().contains("DNS=ops"), "{refused:?}");
    let missing = authenticator.authenticate(None, &[]).await.unwrap_err();
    assert_eq!(missing.reason(), Reason::CertificateMissing);
}

#[tokio::test]
async fn token_precedes_certificate() {
    let files = Files::new();
    files.write("token", "s3cret");
    let authenticator = files.authenticator(&format!("{SINGLE}, {CERTIFICATES}"));
    let leaf = certificate(
        "x",
        vec![SanType::DnsName("a.mail.example.org".try_into().unwrap())],
    );
    let by = async |header: Option<&[u8]>| {
        authenticator
            .authenticate(header, std::slice::from_ref(&leaf))
            .await
    };
    assert_eq!(
        by(None).await.unwrap().name().as_str(),
        "certificate:DNS=a.mail.example.org"
    );
    assert_eq!(
        by(Some(b"Bearer s3cret")).await.unwrap().name().as_str(),
        "token_file"
    );
    assert_eq!(
        by(Some(b"Bearer x")).await.unwrap_err().reason(),
        Reason::TokenWrong
    );
    let without = authenticator.authenticate(None, &[]).await.unwrap_err();
    assert_eq!(without.reason(), Reason::TokenMissing);
}

#[tokio::test]
async fn verified_certificate_alone_permits_everything() {
    let authenticator = Files::new().authenticator("tls: { cert_file: x, key_file: x, client_ca_file: x }");
    let identity = authenticator
        .authenticate(None, &[certificate("ops", Vec::new())])
        .await
        .unwrap();
    assert_eq!(identity.name().as_str(), "certificate:CN=ops");
    assert!(identity.may(Area::Jobs, Verb::Write, None));
}

#[expect(
    clippy::disallowed_methods,
    reason = "the times in tokens are compared with the clock of the system"
)]
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

fn claims() -> Value {
    json!({"iss": "https://login.test", "aud": ["other", "redeliver"], "sub": "billing", "exp": now() + 600,
           "scope": "openid jobs:write:billing-* jobs:rite"})
}

/// The claims with some of them replaced, or removed if the value is null.
fn with(changes: &Value) -> Value {
    let mut claims = claims();
    for (name, value) in changes.as_object().unwrap() {
        match value {
            Value::Null => claims.as_object_mut().unwrap().remove(name),
            value => claims
                .as_object_mut()
                .unwrap()
                .insert(name.clone(), value.clone()),
        };
    }
    claims
}

const JWT: &str = "issuer: https://login.test, audience: redeliver";

#[tokio::test]
async fn invalid_jwts_are_refused() {
    let files = Files::new();
    let issuer = Issuer::new("k1").unwrap();
    files.write("jwks", &jwks(&[&issuer]));
    let authenticator = files.authenticator(&format!(
        "auth: {{ jwt: {{ {JWT}, jwks_file: '{{dir}}/jwks' }} }}"
    ));
    let identity = with_token(&authenticator, &issuer.sign(&claims()).unwrap())
        .await
        .unwrap();
    assert_eq!(identity.name().as_str(), "jwt:https://login.test#billing");
    assert!(identity.may(Area::Jobs, Verb::Write, Some("billing-eu")));
    assert!(
        !identity.may(Area::Jobs, Verb::Write, Some("mail")) && !identity.may_some(Area::Jobs, Verb::Read)
    );

    let within_leeway = with(&json!({"exp": now() - 5, "nbf": now() + 5}));
    accepts(&authenticator, &issuer.sign(&within_leeway).unwrap()).await;
    for (changes, expected) in [
        (json!({"exp": now() - 120}), Reason::TokenExpired),
        (json!({"exp": null}), Reason::TokenWrong),
        (json!({"exp": "soon"}), Reason::TokenWrong),
        (json!({"nbf": now() + 120}), Reason::TokenWrong),
        (json!({"iss": "https://evil.test"}), Reason::TokenWrong),
        (json!({"iss": null}), Reason::TokenWrong),
        (json!({"aud": "other"}), Reason::TokenWrong),
        (json!({"aud": null}), Reason::TokenWrong),
        (json!({"aud": 1}), Reason::TokenWrong),
        (json!({"sub": null}), Reason::TokenWrong),
    ] {
        let token = issuer.sign(&with(&changes)).unwrap();
        assert_eq!(reason(&authenticator, &token).await, expected, "{changes}");
    }
    let valid = issuer.sign(&claims()).unwrap();
    let (message, _) = valid.rsplit_once('.').unwrap();
    let (_, other) = valid.split_once('.').unwrap();
    for (forged, expected) in [
        (issuer.unsigned(&claims()), Reason::TokenMalformed),
        (issuer.signed_with_public_key(&claims()), Reason::TokenWrong),
        // Another key with the same id.
        (
            Issuer::new("k1").unwrap().sign(&claims()).unwrap(),
            Reason::TokenWrong,
        ),
        (
            Issuer::new("k2").unwrap().sign(&claims()).unwrap(),
            Reason::TokenWrong,
        ),
        (format!("{message}.AAAA"), Reason::TokenWrong),
        (format!("x.{other}"), Reason::TokenMalformed),
        ("a.b.c".to_owned(), Reason::TokenMalformed),
        ("opaque".to_owned(), Reason::TokenWrong),
    ] {
        assert_eq!(reason(&authenticator, &forged).await, expected, "{forged}");
    }

    // The file is followed.
    let next = Issuer::new("k2").unwrap();
    files.write("jwks", &jwks(&[&next]));
    follow_files(&authenticator);
    accepts(&authenticator, &next.sign(&claims()).unwrap()).await;
    assert_eq!(reason(&authenticator, &valid).await, Reason::TokenWrong);
    let last = next.sign(&claims()).unwrap();
    files.write("jwks", &jwks(&[]));
    follow_files(&authenticator);
    assert_eq!(reason(&authenticator, &last).await, Reason::TokenWrong);
}

#[tokio::test]
async fn roles_and_nested_claims_give_scopes() {
    let files = Files::new();
    let issuer = Issuer::new("k1").unwrap();
    files.write("jwks", &jwks(&[&issuer]));
    let authenticator = files.authenticator(&format!(
        "auth: {{ jwt: {{ {JWT}, jwks_file: '{{dir}}/jwks', name_claim: azp, scopes_claim: /realm_access/roles, \
         roles: {{ 'billing admin': ['jobs:*:billing-*'] }} }} }}"
    ));
    let roles = with(
        &json!({"azp": "client", "realm_access": {"roles": ["offline", "billing admin", "jobs:read:mail"]}}),
    );
    let identity = with_token(&authenticator, &issuer.sign(&roles).unwrap())
        .await
        .unwrap();
    assert_eq!(identity.name().as_str(), "jwt:https://login.test#client");
    assert!(
        identity.may(Area::Jobs, Verb::Read, Some("billing-eu"))
            && identity.may(Area::Jobs, Verb::Read, Some("mail"))
    );
    assert!(!identity.may(Area::Jobs, Verb::Write, Some("mail")));
}

#[tokio::test]
async fn claims_are_read_as_they_are() {
    let files = Files::new();
    let issuer = Issuer::new("k1").unwrap();
    files.write("jwks", &jwks(&[&issuer]));
    let jwt = format!("{JWT}, jwks_file: '{{dir}}/jwks', scopes_claim: /access/roles");
    let authenticator = files.authenticator(&format!("auth: {{ jwt: {{ {jwt} }} }}"));
    let roles = r#"{"roles":["jobs:read:mail"]}"#;
    let hidden = json!({ "$serde_json::private::RawValue": roles }).to_string();
    for (access, may_read) in [(roles, true), (&hidden, false)] {
        let others = claims()
            .to_string()
            .replacen('{', r#"{"limit":1e400,"nick":"\ud800","#, 1);
        let token = others.replacen('{', &format!(r#"{{"access":{access},"#), 1);
        let identity = with_token(&authenticator, &issuer.sign(&token).unwrap())
            .await
            .unwrap();
        assert_eq!(identity.name().as_str(), "jwt:https://login.test#billing");
        assert_eq!(
            identity.may(Area::Jobs, Verb::Read, Some("mail")),
            may_read,
            "{access}"
        );
    }
}

#[test]
fn key_set_has_only_signing_keys() {
    let issuer = Issuer::new("k1").unwrap();
    let with = |changes: Value| {
        let mut key = issuer.jwk();
        for (name, value) in changes.as_object().unwrap() {
            key[name] = value.clone();
        }
        jwks::KeySet::parse(json!({"keys": [key]}).to_string().as_bytes())
    };
    assert!(with(json!({})).is_ok() && with(json!({"alg": "ES256"})).is_ok());
    for unusable in [
        json!({"use": "enc"}),
        json!({"alg": "HS256"}),
        json!({"alg": "ES384"}),
        json!({"crv": "P-521"}),
        json!({"kty": "oct", "k": "czNjcmV0"}),
        json!({"kty": "new"}),
    ] {
        let error = with(unusable.clone()).unwrap_err();
        assert!(error.contains("no key that can verify"), "{unusable}: {error}");
    }
    for invalid in ["", "[]", "{}", "{\"keys\": 1}"] {
        assert!(jwks::KeySet::parse(invalid.as_bytes()).is_err(), "{invalid}");
    }
    // An issuer can withdraw its last key.
    assert!(jwks::KeySet::parse(br#"{"keys": []}"#).is_ok());
    let other = |random: &mut fastrand::Rng| valid_json::object(random, &[("keys", "[]")]).into_bytes();
    check_each("key sets", FEW, other, |input| {
        assert!(jwks::KeySet::parse(input).is_ok());
    });
    // Without the id of a key, exactly one must fit.
    let two = [&issuer, &Issuer::new("k2").unwrap()];
    let set = jwks::KeySet::parse(jwks(&two).as_bytes()).unwrap();
    let es256 = jsonwebtoken::Algorithm::ES256;
    assert!(set.find(None, es256).is_none() && set.find(Some("k2"), es256).is_some());
    assert!(set.find(Some("k1"), jsonwebtoken::Algorithm::HS256).is_none());
}

#[tokio::test]
async fn fetched_keys_survive_an_outage() {
    let files = Files::new();
    let (old, new) = (Issuer::new("k1").unwrap(), Issuer::new("k2").unwrap());
    // Some issuers replace a key without a new id.
    let replaced = Issuer::new("k1").unwrap();
    let endpoint = FakeEndpoint::start(|_| Reply::status(503));
    let url = format!("http://{}/jwks", endpoint.address());
    let authenticator = files.authenticator(&format!("auth: {{ jwt: {{ {JWT}, jwks_url: '{url}' }} }}"));
    let stop = CancellationToken::new();
    let checks = async {
        // The first fetch has failed: the token may be valid.
        assert_eq!(
            reason(&authenticator, &old.sign(&claims()).unwrap()).await,
            Reason::KeysUnavailable
        );
        let keys = jwks(&[&old]);
        endpoint.behave(move |_| Reply::ok(keys.clone()));
        let valid = old.sign(&claims()).unwrap();
        redeliver_testkit::eventually_async("the keys", Duration::from_secs(30), async || {
            with_token(&authenticator, &valid)
                .await
                .map_err(|refusal| refusal.message().to_owned())
        })
        .await;
        endpoint.behave(|_| Reply::Close);
        let calls = endpoint.calls();
        for _ in 0..50 {
            assert_eq!(
                reason(&authenticator, &new.sign(&claims()).unwrap()).await,
                Reason::TokenWrong
            );
        }
        // Unknown keys cause few fetches.
        assert!(endpoint.calls() <= calls + 3, "{} {calls}", endpoint.calls());
        accepts(&authenticator, &valid).await;
        let keys = jwks(&[&new, &replaced]);
        endpoint.behave(move |_| Reply::ok(keys.clone()));
        let rotated = replaced.sign(&claims()).unwrap();
        redeliver_testkit::eventually_async("the new keys", Duration::from_secs(60), async || {
            with_token(&authenticator, &rotated)
                .await
                .map_err(|refusal| refusal.message().to_owned())
        })
        .await;
        accepts(&authenticator, &new.sign(&claims()).unwrap()).await;
        assert_eq!(reason(&authenticator, &valid).await, Reason::TokenWrong);
        stop.cancel();
    };
    let (followed, ()) = tokio::join!(authenticator.clone().follow(stop.clone()), checks);
    followed.unwrap();
}

#[tokio::test]
async fn stale_keys_expire_after_a_day() {
    let files = Files::new();
    let issuer = Issuer::new("k1").unwrap();
    let keys = jwks(&[&issuer]);
    let endpoint = FakeEndpoint::start(move |_| Reply::ok(keys.clone()));
    let url = format!("http://{}/jwks", endpoint.address());
    let authenticator = files.authenticator(&format!("auth: {{ jwt: {{ {JWT}, jwks_url: '{url}' }} }}"));
    let stop = CancellationToken::new();
    let token = issuer.sign(&claims()).unwrap();
    let becomes = async |expected: Option<Reason>| {
        redeliver_testkit::eventually_async("the answer", Duration::from_secs(60), async || {
            let refused = with_token(&authenticator, &token).await.err();
            let reason = refused.map(|refusal| refusal.reason());
            ensure(reason == expected, format!("{reason:?}"))
        })
        .await;
    };
    let pass = async |hours: u64| {
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(hours * 3_600)).await;
        tokio::time::resume();
    };
    let checks = async {
        becomes(None).await;
        endpoint.behave(|_| Reply::status(503));
        let calls = endpoint.calls();
        pass(23).await;
        redeliver_testkit::eventually_async("a failed fetch", Duration::from_secs(60), async || {
            ensure(endpoint.calls() > calls, calls)
        })
        .await;
        becomes(None).await;
        pass(1).await;
        becomes(Some(Reason::KeysUnavailable)).await;
        let keys = jwks(&[&issuer]);
        endpoint.behave(move |_| Reply::ok(keys.clone()));
        becomes(None).await;
        stop.cancel();
    };
    let (followed, ()) = tokio::join!(authenticator.clone().follow(stop.clone()), checks);
    followed.unwrap();
}

#[test]
fn unusable_file_names_its_field() {
    let files = Files::new();
    files.write("jwks", "{}");
    let path = files.0.path().join("jwks");
    let config = format!(
        "scheduler: {{ auth: {{ jwt: {{ {JWT}, jwks_file: '{}' }} }} }}",
        path.display()
    );
    let config = Config::from_yaml(&config).unwrap();
    let error = Authenticator::check("scheduler", &config.scheduler.api())
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("scheduler.auth.jwt.jwks_file: ") && error.contains(&shown(&path)),
        "{error}"
    );
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

#[test]
fn new_token_matches_its_hash() {
    let new = new_token().unwrap();
    assert!(new.token.len() >= 43 + "redeliver_".len() && new.token.is_ascii());
    let hash = ring::digest::digest(&ring::digest::SHA256, new.token.as_bytes());
    assert_eq!(hash.as_ref(), new.sha256.0);
}
