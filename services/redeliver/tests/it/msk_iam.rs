//! Logins to Amazon MSK with AWS credentials from all their sources, as docs/secure.md describes them.
//!
//! Neither AWS nor a broker that knows its signatures can run here. So a relay in front of a real broker records the tokens that
//! clients send, and the broker rejects them. That signatures are right is tested in `crates/service/src/login/msk_iam.rs`.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use redeliver_core::{Clock as _, SystemClock};
use redeliver_testkit::issuer::{AUDIENCE, Issuer};
use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{FakeEndpoint, LocalKafka, Reply, Request, ServiceProcess, eventually};

use crate::services::path;
use crate::support::{DEADLINE, Pipe, PipeBuilder};

/// Part of every secret key, session token and identity token of these tests.
const SECRET: &str = "hunter2";
const ROLE: &str = "arn:aws:iam::123456789012:role/redeliver";

/// A relay to a broker, which records what clients send.
struct Tap {
    address: SocketAddr,
    sent: Arc<Mutex<Vec<u8>>>,
}

impl Tap {
    fn start(broker: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let sent = Arc::new(Mutex::new(Vec::new()));
        let record = sent.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(broker) = TcpStream::connect(&broker) else {
                    continue;
                };
                let (from_client, from_broker) = (client.try_clone().unwrap(), broker.try_clone().unwrap());
                let record = record.clone();
                std::thread::spawn(move || relay(from_client, broker, Some(&record)));
                std::thread::spawn(move || relay(from_broker, client, None));
            }
        });
        Self { address, sent }
    }

    /// The parameters of all URLs that were sent as tokens, in the order of their arrival.
    fn tokens(&self) -> Vec<BTreeMap<String, String>> {
        let sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let sent = String::from_utf8_lossy(&sent);
        let tokens = sent.split("auth=Bearer ").skip(1);
        tokens
            .filter_map(|rest| rest.split_once('\u{1}'))
            .map(|(token, _)| {
                let url = String::from_utf8(URL_SAFE_NO_PAD.decode(token).unwrap()).unwrap();
                let (base, query) = url.split_once("/?").unwrap();
                let parameters = query.split('&').filter_map(|pair| pair.split_once('='));
                parameters
                    .map(|(name, value)| (name.to_owned(), value.replace("%2F", "/")))
                    .chain([("base".to_owned(), base.to_owned())])
                    .collect()
            })
            .collect()
    }

    /// Waits for a token that is signed by this key, in this region.
    #[track_caller]
    fn until_signed_by(&self, key: &str, region: &str) -> BTreeMap<String, String> {
        eventually(&format!("a token of {key} for {region}"), DEADLINE, || {
            let tokens = self.tokens();
            let found = tokens.iter().find(|token| {
                let credential = &token["X-Amz-Credential"];
                credential.starts_with(&format!("{key}/"))
                    && credential.ends_with(&format!("/{region}/kafka-cluster/aws4_request"))
                    && token["base"] == format!("https://kafka.{region}.amazonaws.com")
            });
            found.cloned().ok_or_else(|| format!("{tokens:?}"))
        })
    }
}

/// Copies until one end closes the connection.
fn relay(mut from: TcpStream, mut to: TcpStream, record: Option<&Mutex<Vec<u8>>>) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        if let Some(record) = record {
            let mut record = record.lock().unwrap_or_else(PoisonError::into_inner);
            record.extend_from_slice(&buffer[..count]);
        }
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    // Fails if the connection is closed already.
    let _ = to.shutdown(Shutdown::Both);
}

struct Msk {
    _kafka: LocalKafka,
    tap: Tap,
    files: Scratch,
    brokers: String,
}

impl Msk {
    fn start() -> Self {
        let files = Scratch::new("msk-iam").unwrap();
        let issuer = Issuer::start("unused", "unused", Duration::from_secs(60)).unwrap();
        let keys = issuer.write_keys(files.path()).unwrap();
        let kafka = LocalKafka::start_with_tokens(&keys, AUDIENCE).unwrap();
        Self {
            tap: Tap::start(kafka.secured_brokers()),
            brokers: kafka.brokers(),
            _kafka: kafka,
            files,
        }
    }

    /// A pipeline with this login, in YAML.
    fn pipe(&self, name: &str, login: &str) -> Pipe {
        PipeBuilder::new(name)
            .brokers(&self.brokers)
            .set("kafka.brokers", &self.tap.address.to_string())
            .set("kafka.properties.security.protocol", "SASL_PLAINTEXT")
            .set("kafka.login.msk_iam", login)
            .without_topics()
    }

    fn file(&self, name: &str, text: &str) -> String {
        let file = self.files.path().join(name);
        std::fs::write(&file, text).unwrap();
        path(&file).to_owned()
    }
}

/// Starts an enricher in this environment.
fn enricher(pipe: Pipe, environment: &[(&str, &str)]) -> ServiceProcess {
    let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
    let environment: Vec<(String, String)> = environment.iter().map(own).collect();
    ServiceProcess::spawn("enricher", move || {
        let mut command = pipe.command("enricher", &[]);
        command.envs(environment.clone());
        command
    })
}

#[track_caller]
fn ends_without_showing_secrets(mut service: ServiceProcess) {
    let (_, config) = service.get("/config");
    service.shut_down();
    for text in [config, service.output()] {
        assert!(
            !text.contains(SECRET) && !text.contains("X-Amz-Signature"),
            "{text}"
        );
    }
}

/// What STS answers to a successful request for credentials.
fn granted(action: &str, key: &str) -> Reply {
    let in_an_hour = SystemClock.now().after(Duration::from_secs(3_600));
    Reply::ok(format!(
        "<{action}Response xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\"><{action}Result><Credentials>\
         <AccessKeyId>{key}</AccessKeyId><SecretAccessKey>{SECRET}</SecretAccessKey>\
         <SessionToken>{SECRET}-{key}</SessionToken><Expiration>{in_an_hour}</Expiration></Credentials>\
         <AssumedRoleUser><Arn>{ROLE}/x</Arn><AssumedRoleId>AROA:x</AssumedRoleId></AssumedRoleUser>\
         </{action}Result></{action}Response>"
    ))
}

/// AWS's Security Token Service: grants a web identity the key `ASIAWEB`, and this one a role with `ASIAROLE`.
fn sts(request: &Request) -> Reply {
    let body = String::from_utf8_lossy(&request.body);
    let has = |parameter: &str| body.split('&').any(|pair| pair == parameter);
    let signer = request
        .headers
        .get("authorization")
        .and_then(|value| value.to_str().ok());
    if has("Action=AssumeRoleWithWebIdentity") && has(&format!("WebIdentityToken={SECRET}-identity")) {
        granted("AssumeRoleWithWebIdentity", "ASIAWEB")
    } else if has("Action=AssumeRole")
        && has("ExternalId=contract-7")
        && has("RoleSessionName=payments")
        && signer.is_some_and(|signer| signer.contains("Credential=ASIAWEB/"))
    {
        granted("AssumeRole", "ASIAROLE")
    } else {
        denied()
    }
}

fn denied() -> Reply {
    let body = "<ErrorResponse xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\"><Error><Type>Sender</Type>\
                <Code>AccessDenied</Code><Message>User is not authorized to perform sts:AssumeRole</Message></Error>\
                <RequestId>1</RequestId></ErrorResponse>";
    Reply::Status(403, Vec::new(), body.into())
}

#[test]
fn services_log_in_with_every_source() {
    let msk = Msk::start();
    let secret = format!("{SECRET}-session");
    let of_environment = [
        ("AWS_ACCESS_KEY_ID", "AKIAENVIRONMENT"),
        ("AWS_SECRET_ACCESS_KEY", SECRET),
        ("AWS_SESSION_TOKEN", secret.as_str()),
        ("AWS_REGION", "eu-west-1"),
    ];
    let mut service = enricher(msk.pipe("env", "{}"), &of_environment);
    let token = msk.tap.until_signed_by("AKIAENVIRONMENT", "eu-west-1");
    assert_eq!(token["Action"], "kafka-cluster%3AConnect");
    assert_eq!(token["X-Amz-Security-Token"], secret);
    assert_eq!(token["X-Amz-Expires"], "900");
    assert!(token["User-Agent"].starts_with("redeliver/"), "{token:?}");
    // The broker rejects it, because it knows no signatures of AWS.
    let output = service.wait_for_output("SASL authentication error", DEADLINE);
    assert!(!output.contains(&token["X-Amz-Signature"]), "{output}");
    ends_without_showing_secrets(service);

    // A profile in the configuration takes precedence over the environment.
    let credentials =
        format!("[streams]\naws_access_key_id = AKIAPROFILE\naws_secret_access_key = {SECRET}\n");
    let credentials = msk.file("credentials", &credentials);
    let config = msk.file("config", "[profile streams]\nregion = ap-south-1\n");
    let service = enricher(
        msk.pipe("profile", "{ profile: streams }"),
        &[
            ("AWS_SHARED_CREDENTIALS_FILE", &credentials),
            ("AWS_CONFIG_FILE", &config),
            ("AWS_ACCESS_KEY_ID", "AKIAENVIRONMENT"),
            ("AWS_SECRET_ACCESS_KEY", SECRET),
        ],
    );
    msk.tap.until_signed_by("AKIAPROFILE", "ap-south-1");
    ends_without_showing_secrets(service);

    // As the webhook of EKS sets them for a service account with a role.
    let identity = msk.file("identity", &format!("{SECRET}-identity"));
    let endpoint = FakeEndpoint::start(sts);
    let url = endpoint.url();
    let of_web_identity = [
        ("AWS_WEB_IDENTITY_TOKEN_FILE", identity.as_str()),
        ("AWS_ROLE_ARN", ROLE),
        ("AWS_ENDPOINT_URL_STS", &url),
    ];
    let service = enricher(msk.pipe("web", "{ region: us-east-2 }"), &of_web_identity);
    let token = msk.tap.until_signed_by("ASIAWEB", "us-east-2");
    assert_eq!(token["X-Amz-Security-Token"], format!("{SECRET}-ASIAWEB"));
    ends_without_showing_secrets(service);
    let login = format!(
        "{{ region: us-east-2, role_arn: '{ROLE}', role_session_name: payments, external_id: contract-7 }}"
    );
    let service = enricher(msk.pipe("role", &login), &of_web_identity);
    msk.tap.until_signed_by("ASIAROLE", "us-east-2");
    ends_without_showing_secrets(service);
}

/// Credentials that expire so soon that the process asks for new ones.
fn container_credentials(key: &str) -> impl Fn(&Request) -> Reply + Send + Sync + 'static {
    let key = key.to_owned();
    move |request| {
        if request
            .headers
            .get("authorization")
            .is_none_or(|sent| sent != SECRET)
        {
            return Reply::status(401);
        }
        let expires = SystemClock.now().after(Duration::from_secs(5));
        Reply::ok(format!(
            "{{\"AccessKeyId\":\"{key}\",\"SecretAccessKey\":\"{SECRET}\",\"Token\":\"{SECRET}-session\",\
             \"Expiration\":\"{expires}\"}}"
        ))
    }
}

#[test]
fn container_credentials_are_renewed() {
    let msk = Msk::start();
    let endpoint = FakeEndpoint::start(container_credentials("ASIAFIRST"));
    let url = format!("{}/v1/credentials", endpoint.url());
    let token_file = msk.file("container-token", SECRET);
    let mut service = enricher(
        msk.pipe("container", "{ region: eu-central-1 }"),
        &[
            ("AWS_CONTAINER_CREDENTIALS_FULL_URI", &url),
            ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", &token_file),
        ],
    );
    msk.tap.until_signed_by("ASIAFIRST", "eu-central-1");
    // The token expires with the credentials, not 15 minutes after it was signed.
    let expiry = service.metric("redeliver_kafka_token_expiry_timestamp_seconds");
    let in_a_minute = SystemClock.now().after(Duration::from_secs(60));
    assert!(i64::try_from(expiry).unwrap() * 1_000 < in_a_minute.as_millis());
    endpoint.behave(container_credentials("ASIASECOND"));
    msk.tap.until_signed_by("ASIASECOND", "eu-central-1");
    endpoint.behave(|_| Reply::Close);
    let output = service.wait_for_output("cannot get a token for Kafka; retrying", DEADLINE);
    assert!(
        output.contains("kafka.login.msk_iam: cannot get AWS credentials: "),
        "{output}"
    );
    assert!(service.metric("redeliver_kafka_token_failures_total") > 0);
    endpoint.behave(container_credentials("ASIATHIRD"));
    msk.tap.until_signed_by("ASIATHIRD", "eu-central-1");
    ends_without_showing_secrets(service);
}

/// The unit tests of the login have more answers of STS and of containers.
#[test]
fn unusable_credentials_are_explained() {
    let sts = FakeEndpoint::start(sts);
    let of_role = [
        ("AWS_ACCESS_KEY_ID", "AKIA"),
        ("AWS_SECRET_ACCESS_KEY", SECRET),
        ("AWS_ENDPOINT_URL_STS", &sts.url()),
    ];
    let no_metadata = [("AWS_EC2_METADATA_DISABLED", "true")];
    let role = format!("region: eu-central-1, role_arn: '{ROLE}'");
    for (name, login, environment, problem) in [
        (
            "nowhere",
            "",
            &no_metadata[..],
            ".region: is missing; neither the names of the brokers nor AWS's environment contain it (AWS_REGION)",
        ),
        (
            "frankfurt",
            "region: eu-central-1",
            &no_metadata,
            ": there are no AWS credentials; ",
        ),
        (
            "profile",
            "region: eu-central-1, profile: streams",
            &no_metadata,
            ".profile: AWS's shared files contain no profile `streams` with credentials",
        ),
        (
            "role",
            &role,
            &of_role,
            ".role_arn: STS answered 403: AccessDenied",
        ),
    ] {
        let pipe = PipeBuilder::new(name)
            // The commands end before they connect.
            .brokers("127.0.0.1:9092")
            .set("kafka.login.msk_iam", &format!("{{ {login} }}"))
            .without_topics();
        let mut command = pipe.command("redeliver", &["topics", "check"]);
        let output = command.envs(environment.iter().copied()).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        let expected = format!("cannot get a token for Kafka: kafka.login.msk_iam{problem}");
        assert!(stderr.contains(&expected), "{stderr}\ninstead of {expected}");
        assert!(!stderr.contains(SECRET), "{stderr}");
    }
}
