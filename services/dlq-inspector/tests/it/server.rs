//! Reflection, health checks and tokens.

use futures::StreamExt as _;
use redeliver_proto::auth::SendToken;
use redeliver_proto::v1;
use redeliver_proto::v1::access_service_client::AccessServiceClient;
use tonic::Code;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_reflection::pb::{v1 as reflection_v1, v1alpha as reflection_v1alpha};

use crate::support::{Client, InspectorEnv, Sending, assert_refused, dead, get_page};

macro_rules! reflected {
    ($channel:expr, $pb:ident) => {{
        use $pb::server_reflection_client::ServerReflectionClient;
        use $pb::server_reflection_request::MessageRequest;
        use $pb::server_reflection_response::MessageResponse;
        let requests = [
            MessageRequest::ListServices(String::new()),
            MessageRequest::FileContainingSymbol("redeliver.v1.DeadLetterService".to_owned()),
            MessageRequest::FileContainingSymbol("google.protobuf.Timestamp".to_owned()),
            MessageRequest::FileContainingSymbol("google.rpc.ErrorInfo".to_owned()),
        ];
        let requests = requests.map(|request| $pb::ServerReflectionRequest {
            host: String::new(),
            message_request: Some(request),
        });
        let mut client = ServerReflectionClient::new($channel);
        let stream = client
            .server_reflection_info(futures::stream::iter(requests))
            .await;
        let answers: Vec<_> = stream.unwrap().into_inner().collect().await;
        let mut services = Vec::new();
        for answer in answers {
            match answer.unwrap().message_response.unwrap() {
                MessageResponse::ListServicesResponse(list) => {
                    services.extend(list.service.into_iter().map(|service| service.name));
                }
                MessageResponse::FileDescriptorResponse(files) => {
                    assert!(!files.file_descriptor_proto.is_empty())
                }
                other => panic!("{other:?}"),
            }
        }
        services.sort();
        services
    }};
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_require_token_with_scope() {
    let mut env = InspectorEnv::new("token");
    let file = env.base.directory().join("token");
    std::fs::write(&file, "s3cret\n").unwrap();
    env.base
        .set("dlq_inspector.token_file", &file.display().to_string());
    let scopes = [("reader", "dead-letters:read"), ("other", "jobs:*")];
    let tokens = env.set_tokens(scopes.map(|(name, scope)| (name, vec![scope.to_owned()])));
    let topic = env.create_topic("a", 1).await;
    env.put(&topic, 0, vec![dead("k", "v", &[])]).await;
    let mut inspector = env.start().await;
    assert_eq!(
        inspector.health().await.map(Result::ok),
        [Some(ServingStatus::Serving); 2]
    );
    let expected = |reflection: &str| {
        let mut services = [
            reflection,
            "grpc.health.v1.Health",
            "redeliver.v1.AccessService",
            "redeliver.v1.AuditService",
            "redeliver.v1.ControlService",
            "redeliver.v1.DeadLetterService",
            "redeliver.v1.OverviewService",
            "redeliver.v1.RedriveService",
            "redeliver.v1.WaitingService",
        ]
        .map(str::to_owned);
        services.sort();
        services.to_vec()
    };
    let services = reflected!(inspector.channel().await, reflection_v1);
    assert_eq!(services, expected("grpc.reflection.v1.ServerReflection"));
    let services = reflected!(inspector.channel().await, reflection_v1alpha);
    assert_eq!(services, expected("grpc.reflection.v1alpha.ServerReflection"));
    for (token, scope, expected) in [
        (None, None, Some((Code::Unauthenticated, "TOKEN_MISSING"))),
        (Some("wrong"), None, Some((Code::Unauthenticated, "TOKEN_WRONG"))),
        // Has no scope for dead letters.
        (
            Some(&*tokens["other"].token),
            Some("jobs:*"),
            Some((Code::PermissionDenied, "PERMISSION_DENIED")),
        ),
        (Some(&*tokens["reader"].token), Some("dead-letters:read"), None),
        (Some("s3cret"), Some("*"), None),
    ] {
        let interceptor = SendToken::new(token).unwrap();
        let mut access =
            AccessServiceClient::with_interceptor(inspector.channel().await, interceptor.clone());
        let access = access.get_access(v1::GetAccessRequest {}).await;
        let scopes = access.ok().map(|access| access.into_inner().scopes);
        assert_eq!(scopes, scope.map(|scope| vec![scope.to_owned()]));
        let mut client = Client::new(Sending::new(inspector.channel().await, interceptor));
        let listed = get_page(&mut client, "").await;
        let watched = v1::WatchDeadLettersRequest::default();
        let watched = client.watch_dead_letters(watched).await;
        match expected {
            None => {
                assert_eq!(listed.unwrap().dead_letters.len(), 1);
                assert!(watched.is_ok());
            }
            Some((code, why)) => {
                for refused in [listed.unwrap_err(), watched.unwrap_err()] {
                    assert_refused(&refused, code, why);
                }
            }
        }
    }
    assert!(!inspector.process.output().contains("s3cret"));
    assert!(!inspector.process.get("/config").1.contains("s3cret"));
}
