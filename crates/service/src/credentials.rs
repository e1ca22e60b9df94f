//! The files with which the Kafka clients of a process authenticate: certificates, keys and CAs that `kafka.properties`
//! names, and properties with a value `{ file: PATH }`.
//!
//! Clients get the contents, in properties of librdkafka that take them instead of a path. [`redeliver_kafka::credentials`]
//! decides when clients are replaced.

use std::path::{Path, PathBuf};
use std::time::Duration;

#[cfg(feature = "kafka-tls")]
use openssl::pkcs12::Pkcs12;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use redeliver_core::{Clock as _, SystemClock, Timestamp};
use redeliver_kafka::{CredentialObserver, CredentialSource, Credentials, KafkaSettings, SecretProperties};
use redeliver_runtime::Config;
use redeliver_runtime::config::{ConfigError, InvalidField, Secret, Settings};
use redeliver_runtime::watched_files::{
    CHECK_INTERVAL, ConfiguredFile, FileContents, StaleCredentials, WatchedFiles,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;

const CERTIFICATE: &str = "ssl.certificate.pem";
const KEY: &str = "ssl.key.pem";
const CA: &str = "ssl.ca.pem";
const KEYSTORE: &str = "ssl.keystore.location";
const KEYSTORE_PASSWORD: &str = "ssl.keystore.password";
/// Properties that name a PEM file, and those that contain the same as text.
const PEM_FILES: [(&str, &str); 3] = [
    ("ssl.certificate.location", CERTIFICATE),
    ("ssl.key.location", KEY),
    ("ssl.ca.location", CA),
];

/// The property that results from a file.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Use {
    /// The text of the file is the value of this property.
    Text(String),
    /// The PEM file is the value of this property.
    Pem(&'static str),
    /// A PKCS #12 file.
    Keystore,
    /// The password of the PKCS #12 file.
    KeystorePassword,
}

/// What the files contain.
struct Contents {
    properties: SecretProperties,
    /// When the client certificate expires.
    expires: Option<Timestamp>,
}

/// The files of `kafka.properties`.
struct Files {
    uses: Vec<Use>,
    /// The name of the property of each file.
    names: Vec<String>,
    contents: WatchedFiles<Contents>,
}

impl Files {
    /// Reads the files; `None` if there are none.
    ///
    /// # Errors
    /// When a file cannot be used. The problem names the field and the file.
    fn load(properties: &Settings) -> Result<Option<Self>, InvalidField> {
        let mut found: Vec<(&str, PathBuf, Use)> = Vec::new();
        for (name, path) in properties.files() {
            let used = match name {
                KEYSTORE_PASSWORD => Use::KeystorePassword,
                name => Use::Text(name.to_owned()),
            };
            found.push((name, path.to_owned(), used));
        }
        let path = |name: &str| properties.get(name).map(PathBuf::from);
        for (name, pem) in PEM_FILES {
            // If both are set, librdkafka decides what that means.
            let path = path(name).filter(|path| is_file(path) && properties.get(pem).is_none());
            found.extend(path.map(|path| (name, path, Use::Pem(pem))));
        }
        found.extend(path(KEYSTORE).map(|path| (KEYSTORE, path, Use::Keystore)));
        if found.is_empty() {
            return Ok(None);
        }
        let names = found.iter().map(|(name, ..)| (*name).to_owned()).collect();
        let uses: Vec<Use> = found.iter().map(|(.., used)| used.clone()).collect();
        let files = found.into_iter().map(|(name, path, _)| ConfiguredFile {
            field: format!("kafka.properties.{name}"),
            path,
        });
        let files = files.collect();
        let password = properties.get(KEYSTORE_PASSWORD).map(Secret::new);
        let parse = {
            let uses = uses.clone();
            move |files: &[FileContents<'_>]| parse(&uses, password.as_ref(), files)
        };
        Ok(Some(Self {
            uses,
            names,
            contents: WatchedFiles::load(files, parse)?,
        }))
    }

    /// The properties that the contents of the files replace.
    fn replaced(&self) -> impl Iterator<Item = &str> {
        let keystore = self.uses.contains(&Use::Keystore).then_some(KEYSTORE_PASSWORD);
        self.names.iter().map(String::as_str).chain(keystore)
    }
}

/// `ssl.ca.location` may also be a directory, or `probe`: librdkafka then looks for the CAs of the system.
fn is_file(path: &Path) -> bool {
    !path.is_dir() && path != Path::new("probe")
}

fn parse(
    uses: &[Use],
    password: Option<&Secret>,
    files: &[FileContents<'_>],
) -> Result<Contents, InvalidField> {
    let mut properties = SecretProperties::default();
    let read = |file: &FileContents<'_>| {
        let secret = Secret::in_file(file.bytes, file.path()).map_err(|problem| file.problem(problem))?;
        if secret.expose().contains('\0') {
            return Err(file.problem(format!("{} is not a text file", file.path().display())));
        }
        Ok(secret)
    };
    let of = |wanted: Use| {
        let mut pairs = uses.iter().zip(files);
        pairs.find(|(used, _)| **used == wanted).map(|(_, file)| file)
    };
    for (used, file) in uses.iter().zip(files) {
        match used {
            Use::Text(name) => properties.set(name, read(file)?.expose()),
            Use::Pem(name) => properties.set(*name, format!("{}\n", read(file)?.expose())),
            Use::KeystorePassword => {}
            Use::Keystore => {
                let from_file = of(Use::KeystorePassword).map(read).transpose()?;
                let password = from_file.as_ref().or(password);
                unpack(file, password, &mut properties)?;
            }
        }
    }
    let expires = properties.get(CERTIFICATE).and_then(expiry);
    Ok(Contents { properties, expires })
}

#[cfg(not(feature = "kafka-tls"))]
fn unpack(file: &FileContents<'_>, _: Option<&Secret>, _: &mut SecretProperties) -> Result<(), InvalidField> {
    Err(file.problem(redeliver_kafka::WITHOUT_TLS.to_owned()))
}

/// Takes certificates and key out of a PKCS #12 file, as librdkafka would.
#[cfg(feature = "kafka-tls")]
fn unpack(
    file: &FileContents<'_>,
    password: Option<&Secret>,
    properties: &mut SecretProperties,
) -> Result<(), InvalidField> {
    let unusable = |reason: &str| {
        let path = file.path().display();
        file.problem(format!(
            "{path} is not a PKCS #12 file with a certificate and its key: {reason}"
        ))
    };
    let failed = |error: openssl::error::ErrorStack| {
        let first = error.errors().first();
        unusable(
            first
                .and_then(openssl::error::Error::reason)
                .unwrap_or("unknown error"),
        )
    };
    let password = password.map_or("", Secret::expose);
    let parsed = Pkcs12::from_der(file.bytes).and_then(|store| store.parse2(password));
    let parsed = parsed.map_err(failed)?;
    let (Some(certificate), Some(key)) = (parsed.cert, parsed.pkey) else {
        return Err(unusable("it has only one of them"));
    };
    let mut chain = certificate.to_pem().map_err(failed)?;
    for intermediate in parsed.ca.iter().flatten() {
        chain.extend(intermediate.to_pem().map_err(failed)?);
    }
    let key = key.private_key_to_pem_pkcs8().map_err(failed)?;
    // PEM is ASCII.
    properties.set(CERTIFICATE, String::from_utf8_lossy(&chain));
    properties.set(KEY, String::from_utf8_lossy(&key));
    Ok(())
}

/// When the first certificate of a chain expires; `None` if it cannot be parsed. librdkafka then says why.
fn expiry(pem: &str) -> Option<Timestamp> {
    let der = CertificateDer::pem_slice_iter(pem.as_bytes()).next()?.ok()?;
    let (_, certificate) = x509_parser::parse_x509_certificate(&der).ok()?;
    let seconds = certificate.validity().not_after.timestamp();
    Some(Timestamp::from_millis(seconds.saturating_mul(1_000)))
}

/// Metrics of the files.
#[derive(Default)]
struct Metrics {
    /// Whether the files cannot be used, according to [`WatchedFiles`].
    unusable: Gauge,
    /// Whether what is used is not what the files contain, for whatever reason.
    stale: Gauge,
    expiry: Gauge,
    outdated: Gauge,
}

impl Metrics {
    fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register(
            "kafka_certificate_expiry_timestamp_seconds",
            "When the client certificate for Kafka expires; 0 without a certificate",
            metrics.expiry.clone(),
        );
        registry.register(
            "kafka_clients_outdated",
            "Owners of Kafka clients, such as lanes, that still use previous credentials",
            metrics.outdated.clone(),
        );
        metrics
    }
}

impl CredentialObserver for Metrics {
    fn stale(&self, is_stale: bool) {
        self.stale.set((is_stale || self.unusable.get() == 1).into());
    }

    fn using(&self, properties: &SecretProperties) {
        let expires = properties.get(CERTIFICATE).and_then(expiry);
        self.expiry
            .set(expires.map_or(0, |expires| expires.as_millis() / 1_000));
    }

    fn outdated(&self, owners: usize) {
        self.outdated.set(i64::try_from(owners).unwrap_or(i64::MAX));
    }
}

impl CredentialSource for Files {
    const INTERVAL: Duration = CHECK_INTERVAL;

    fn check(&mut self) -> Result<SecretProperties, String> {
        self.contents.check();
        let contents = self.contents.value();
        match contents.expires {
            Some(expired) if expired <= SystemClock.now() => {
                Err(format!("the client certificate has expired at {expired}"))
            }
            _ => Ok(contents.properties.clone()),
        }
    }
}

/// Checks the files.
///
/// # Errors
/// When a file cannot be used. The problem names the field and the file.
pub(crate) fn check(config: &Config) -> Result<(), InvalidField> {
    Files::load(&config.kafka.properties).map(drop)
}

/// Follows the files, if there are any. Changes `kafka` so that its clients use what they contain.
///
/// # Errors
/// When a file cannot be used, or no thread can be created.
pub(crate) fn start(
    config: &Config,
    kafka: &mut KafkaSettings,
    stale: &StaleCredentials,
    registry: &mut Registry,
) -> anyhow::Result<()> {
    let mut metrics = Metrics::register(registry);
    let Some(files) = Files::load(&config.kafka.properties).map_err(ConfigError::from)? else {
        return Ok(());
    };
    for name in files.replaced() {
        kafka.properties.remove(name);
    }
    metrics.stale = stale.of("kafka.properties");
    files.contents.observe(metrics.unusable.clone());
    let initial = files.contents.value().properties.clone();
    let spread = config.kafka.credentials_spread.duration();
    kafka.credentials = Some(Credentials::start(
        files,
        initial,
        kafka.clone(),
        spread,
        metrics,
    )?);
    Ok(())
}

#[cfg(all(test, feature = "kafka-tls"))]
#[expect(clippy::disallowed_types, reason = "settings of these tests")]
mod tests {
    use openssl::pkey::PKey;
    use openssl::x509::X509;
    use redeliver_testkit::certificates::Authority;
    use redeliver_testkit::scratch::Scratch;

    use super::*;

    fn settings(values: serde_json::Value) -> Settings {
        serde_json::from_value(values).unwrap()
    }

    fn load(values: serde_json::Value) -> Result<Option<Files>, String> {
        Files::load(&settings(values)).map_err(|problem| problem.to_string())
    }

    #[test]
    fn clients_get_file_contents() {
        let scratch = Scratch::new("kafka-files").unwrap();
        let authority = Authority::new().unwrap();
        let signed = authority.sign().unwrap();
        let (certificate, key) = signed.write(scratch.path(), "tls").unwrap();
        let ca = authority.write(scratch.path(), "ca.crt").unwrap();
        let password = scratch.path().join("password");
        std::fs::write(&password, "hunter2\n").unwrap();
        let mut files = load(serde_json::json!({
            "linger.ms": "5",
            "sasl.password": { "file": password },
            "ssl.certificate.location": certificate,
            "ssl.key.location": key,
            "ssl.ca.location": ca,
        }));
        let files = files.as_mut().unwrap().as_mut().unwrap();
        let replaced: Vec<&str> = files.replaced().collect();
        let locations = ["ssl.certificate.location", "ssl.key.location", "ssl.ca.location"];
        assert_eq!(replaced, [&["sasl.password"][..], &locations].concat());
        let properties = files.check().unwrap();
        assert_eq!(properties.get("sasl.password"), Some("hunter2"));
        for (name, expected) in [
            (CERTIFICATE, &signed.certificate),
            (KEY, &signed.key),
            (CA, &authority.pem()),
        ] {
            assert_eq!(properties.get(name), Some(&**expected));
        }
        assert!(files.contents.value().expires.unwrap() > SystemClock.now());
        authority
            .sign_expired()
            .unwrap()
            .write(scratch.path(), "tls")
            .unwrap();
        // A change is used when two checks have read the same.
        assert!(files.check().is_ok());
        let expired = files.check().unwrap_err();
        assert!(
            expired.starts_with("the client certificate has expired at 2020-01-31"),
            "{expired}"
        );
    }

    #[test]
    fn a_keystore_is_unpacked() {
        let scratch = Scratch::new("kafka-keystore").unwrap();
        let signed = Authority::new().unwrap().sign().unwrap();
        let key = PKey::private_key_from_pem(signed.key.as_bytes()).unwrap();
        let certificate = X509::from_pem(signed.certificate.as_bytes()).unwrap();
        let keystore = scratch.path().join("client.p12");
        let mut builder = Pkcs12::builder();
        let built = builder.pkey(&key).cert(&certificate).build2("hunter2").unwrap();
        std::fs::write(&keystore, built.to_der().unwrap()).unwrap();
        let with = |password: serde_json::Value| {
            load(serde_json::json!({ KEYSTORE: keystore, KEYSTORE_PASSWORD: password }))
        };
        let password = scratch.path().join("password");
        std::fs::write(&password, "hunter2\n").unwrap();
        for password in [
            serde_json::json!("hunter2"),
            serde_json::json!({ "file": password }),
        ] {
            let mut files = with(password).unwrap().unwrap();
            assert!(files.replaced().any(|name| name == KEYSTORE_PASSWORD));
            let properties = files.check().unwrap();
            assert_eq!(properties.get(CERTIFICATE), Some(&*signed.certificate));
            let unpacked = PKey::private_key_from_pem(properties.get(KEY).unwrap().as_bytes()).unwrap();
            assert!(unpacked.public_eq(&key));
            assert_eq!(properties.get(KEYSTORE_PASSWORD), None);
        }
        let wrong = with(serde_json::json!("swordfish")).err().unwrap();
        let expected = format!(
            "kafka.properties.ssl.keystore.location: {} is not a PKCS #12 file with a certificate and its key: ",
            keystore.display()
        );
        assert!(wrong.starts_with(&expected), "{wrong}");
        assert!(!wrong.contains("swordfish"), "{wrong}");
    }

    #[test]
    fn other_locations_are_left_to_librdkafka() {
        let scratch = Scratch::new("kafka-none").unwrap();
        for ca in ["probe", scratch.path().to_str().unwrap()] {
            assert!(
                load(serde_json::json!({ "ssl.ca.location": ca }))
                    .unwrap()
                    .is_none()
            );
        }
        assert!(load(serde_json::json!({ "linger.ms": "5" })).unwrap().is_none());
        let missing = scratch.path().join("missing");
        let problem = load(serde_json::json!({ "ssl.key.location": missing }))
            .err()
            .unwrap();
        let expected = format!(
            "kafka.properties.ssl.key.location: cannot read {}: ",
            missing.display()
        );
        assert!(problem.starts_with(&expected), "{problem}");
    }
}
