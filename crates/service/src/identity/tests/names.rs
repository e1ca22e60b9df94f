//! What callers are called.

use std::collections::BTreeSet;

use redeliver_testkit::fuzz::fuzz;

use super::*;

const ANY_CERTIFICATE: &str = "tls: { cert_file: x, key_file: x, client_ca_file: x }";

/// An authenticator for tokens of this issuer, in addition to these settings.
fn with_jwt(files: &Files, issuer: &Issuer, auth: &str) -> Authenticator {
    files.write("jwks", &jwks(&[issuer]));
    files.authenticator(&format!(
        "{SINGLE}, {ANY_CERTIFICATE}, auth: {{ {auth}, jwt: {{ {JWT}, jwks_file: '{{dir}}/jwks' }} }}"
    ))
}

#[tokio::test]
async fn the_same_name_differs_by_mechanism() {
    let files = Files::new();
    let issuer = Issuer::new("k1").unwrap();
    let (bob, anonymous) = (new_token().unwrap(), new_token().unwrap());
    let listed = [("bob", &bob, "jobs:read"), ("anonymous", &anonymous, "jobs:read")];
    files.write("tokens", &tokens_file(&listed));
    files.write("token", "s3cret");
    let auth = "tokens_file: '{dir}/tokens', client_certificates: [ { cn: '*', scopes: ['*'] }, { dns: '*', scopes: ['*'] } ]";
    let authenticator = with_jwt(&files, &issuer, auth);

    let mut names = BTreeSet::new();
    let mut add = |identity: Identity| {
        let name = identity.name().to_string();
        assert!(!identity.name().is_anonymous(), "{name}");
        assert!(names.insert(name), "{identity:?}");
    };
    for token in [&bob.token, &anonymous.token, "s3cret"] {
        add(with_token(&authenticator, token).await.unwrap());
    }
    let key = KeyPair::generate().unwrap();
    for sub in [
        "bob",
        "automatic",
        "token_file",
        "anonymous",
        "token:bob",
        "certificate:CN=bob",
    ] {
        let token = issuer.sign(&with(&json!({ "sub": sub }))).unwrap();
        add(with_token(&authenticator, &token).await.unwrap());
        for leaf in [
            certificate(sub, Vec::new()),
            named_certificate(None, vec![SanType::DnsName(sub.try_into().unwrap())], &key),
        ] {
            add(authenticator.authenticate(None, &[leaf]).await.unwrap());
        }
    }
    assert!(names.contains("jwt:https://login.test#bob"), "{names:?}");
    for name in [
        "token:bob",
        "token_file",
        "certificate:CN=bob",
        "certificate:DNS=bob",
    ] {
        assert!(names.contains(name), "{name} {names:?}");
    }
    // No caller is named like the services themselves, or like a caller without credentials.
    assert!(!names.contains("automatic") && !names.contains("anonymous"));
}

#[tokio::test]
async fn unusable_names_are_refused() {
    let files = Files::new();
    let issuer = Issuer::new("k1").unwrap();
    files.write("token", "s3cret");
    let entry = "client_certificates: [ { cn: '*', scopes: ['*'] } ]";
    let authenticator = with_jwt(&files, &issuer, entry);
    let only_verified = files.authenticator(ANY_CERTIFICATE);
    let longest = "é".repeat(256);
    let too_long = format!("{longest}x");
    for (name, is_usable) in [
        (longest.as_str(), true),
        ("ann@example.org", true),
        ("Zoë O'Neil", true),
        (too_long.as_str(), false),
        ("", false),
        ("a\nb", false),
        ("a\0", false),
        ("a\u{9b}b", false),
        ("bob\u{202e}nimda", false),
        ("b\u{200b}ob", false),
        ("bob\u{fe0f}", false),
        ("bob ", false),
        ("\u{feff}bob", false),
        ("b\u{e0061}ob", false),
    ] {
        let token = issuer.sign(&with(&json!({ "sub": name }))).unwrap();
        let by_token = with_token(&authenticator, &token).await;
        let leaf = certificate(name, Vec::new());
        let certificates = std::slice::from_ref(&leaf);
        let by_entry = authenticator.authenticate(None, certificates).await;
        let by_ca = only_verified.authenticate(None, certificates).await;
        if is_usable {
            for (identity, prefix) in [
                (by_token, "jwt:https://login.test#"),
                (by_entry, "certificate:CN="),
                (by_ca, "certificate:CN="),
            ] {
                assert_eq!(identity.unwrap().name().as_str(), format!("{prefix}{name}"));
            }
            continue;
        }
        let refused = by_token.unwrap_err();
        assert_eq!(refused.reason(), Reason::TokenWrong, "{name:?}");
        assert!(refused.message().contains("`sub`"), "{refused:?}");
        assert!(refused.message().contains("512 bytes"), "{refused:?}");
        for refused in [by_entry.unwrap_err(), by_ca.unwrap_err()] {
            assert_eq!(refused.reason(), Reason::CertificateUnknown, "{name:?}");
            assert!(refused.message().contains("512 bytes"), "{refused:?}");
            assert!(!refused.message().contains(char::is_control), "{refused:?}");
        }
    }
}

#[test]
fn foreign_names_are_bounded_and_distinguishable() {
    let files = Files::new();
    let issuer = Issuer::new("k1").unwrap();
    files.write("token", "s3cret");
    let entry = "client_certificates: [ { cn: '*', scopes: ['*'] } ]";
    let authenticator = with_jwt(&files, &issuer, entry);
    let key = KeyPair::generate().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let valid = [
        "ann",
        "token:bob",
        "jwt:https://login.test#ann",
        "a\u{202e}b",
        "x\u{200b}",
    ];
    let valid: Vec<Vec<u8>> = valid.map(|name| name.as_bytes().to_vec()).into();
    fuzz("names of callers", 500, &valid, |input| {
        let name = String::from_utf8_lossy(input);
        let token = issuer.sign(&with(&json!({ "sub": name }))).unwrap();
        let leaf = named_certificate(Some(&name), Vec::new(), &key);
        let identified = [
            (
                runtime.block_on(with_token(&authenticator, &token)),
                "jwt:https://login.test#",
            ),
            (
                runtime.block_on(authenticator.authenticate(None, &[leaf])),
                "certificate:CN=",
            ),
        ];
        for (identified, prefix) in identified {
            match identified {
                Ok(identity) => {
                    let shown = identity.name().as_str();
                    assert_eq!(shown.strip_prefix(prefix), Some(&*name));
                    assert!(shown.len() <= 600 && !shown.contains(char::is_control));
                }
                Err(refused) => {
                    assert!(redeliver_runtime::config::caller_name(&name).is_err());
                    assert!(!refused.message().contains(char::is_control), "{refused:?}");
                    assert!(refused.message().len() < 1_000, "{refused:?}");
                }
            }
        }
    });
}
