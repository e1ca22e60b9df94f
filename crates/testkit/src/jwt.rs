//! An issuer of JSON Web Tokens.

use std::fmt::Display;

use anyhow::{Result, anyhow};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::hmac;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _};
use serde_json::{Value, json};

/// A key of an issuer, for ES256.
pub struct Issuer {
    id: String,
    key: EcdsaKeyPair,
}

impl Issuer {
    /// Creates a key with this id.
    ///
    /// # Errors
    /// If no key can be made.
    pub fn new(id: &str) -> Result<Self> {
        let random = SystemRandom::new();
        let pkcs8 = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random)
            .map_err(|_| anyhow!("making the key of an issuer"))?;
        let key = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, pkcs8.as_ref(), &random)
            .map_err(|error| anyhow!("reading the key of an issuer: {error}"))?;
        Ok(Self {
            id: id.to_owned(),
            key,
        })
    }

    /// The public key as a JSON Web Key.
    pub fn jwk(&self) -> Value {
        // An uncompressed point: 4, x, y.
        let point = self.key.public_key().as_ref();
        let (x, y) = (
            URL_SAFE_NO_PAD.encode(&point[1..33]),
            URL_SAFE_NO_PAD.encode(&point[33..]),
        );
        json!({"kty": "EC", "crv": "P-256", "use": "sig", "kid": self.id, "x": x, "y": y})
    }

    /// A token with these claims.
    ///
    /// # Errors
    /// If it cannot be signed.
    pub fn sign(&self, claims: &impl Display) -> Result<String> {
        let message = self.message("ES256", claims);
        let signature = self
            .key
            .sign(&SystemRandom::new(), message.as_bytes())
            .map_err(|_| anyhow!("signing a token"))?;
        Ok(format!("{message}.{}", URL_SAFE_NO_PAD.encode(signature)))
    }

    /// A forged token without a signature, which names no algorithm.
    pub fn unsigned(&self, claims: &impl Display) -> String {
        format!("{}.", self.message("none", claims))
    }

    /// A forged token that uses the public key as a shared secret.
    pub fn signed_with_public_key(&self, claims: &impl Display) -> String {
        let message = self.message("HS256", claims);
        let secret = hmac::Key::new(hmac::HMAC_SHA256, self.key.public_key().as_ref());
        let signature = hmac::sign(&secret, message.as_bytes());
        format!("{message}.{}", URL_SAFE_NO_PAD.encode(signature))
    }

    fn message(&self, algorithm: &str, claims: &impl Display) -> String {
        let header = json!({"alg": algorithm, "typ": "JWT", "kid": self.id}).to_string();
        let (header, claims) = (
            URL_SAFE_NO_PAD.encode(header),
            URL_SAFE_NO_PAD.encode(claims.to_string()),
        );
        format!("{header}.{claims}")
    }
}

/// The public keys of issuers as a JSON Web Key Set.
pub fn jwks(issuers: &[&Issuer]) -> String {
    let keys: Vec<Value> = issuers.iter().map(|issuer| issuer.jwk()).collect();
    json!({"keys": keys}).to_string()
}
