//! A collector for tests: receives spans over OTLP/gRPC and keeps them.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use opentelemetry_proto::tonic::trace::v1::Span;
use tokio::task::JoinSet;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

/// A running collector; ends when it is dropped.
#[derive(Debug)]
pub(crate) struct OtlpReceiver {
    address: SocketAddr,
    spans: Arc<Mutex<Vec<ReceivedSpan>>>,
    _server: JoinSet<()>,
}

/// A span with the attributes of the process that sent it.
#[derive(Clone, Debug)]
pub(crate) struct ReceivedSpan {
    pub(crate) resource: Vec<KeyValue>,
    pub(crate) span: Span,
}

impl OtlpReceiver {
    /// Starts a collector on a free port.
    pub(crate) async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let spans = Arc::new(Mutex::new(Vec::new()));
        let service = TraceServiceServer::new(Collector(spans.clone()));
        let mut server = JoinSet::new();
        server.spawn(async move {
            let incoming = TcpIncoming::from(listener);
            tonic::transport::Server::builder()
                .add_service(service)
                .serve_with_incoming(incoming)
                .await
                .unwrap();
        });
        Self {
            address,
            spans,
            _server: server,
        }
    }

    /// Where to send spans to.
    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// What has been received so far.
    pub(crate) fn spans(&self) -> Vec<ReceivedSpan> {
        self.spans.lock().unwrap().clone()
    }

    /// Waits until `count` spans have been received.
    pub(crate) async fn wait_for(&self, count: usize) -> Vec<ReceivedSpan> {
        for _ in 0..1_000 {
            if self.spans().len() >= count {
                return self.spans();
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{count} spans were expected, received are {:#?}", self.spans());
    }
}

impl ReceivedSpan {
    /// A text attribute of the process.
    pub(crate) fn resource(&self, key: &str) -> Option<&str> {
        text(&self.resource, key)
    }

    /// A text attribute of the span.
    pub(crate) fn attribute(&self, key: &str) -> Option<&str> {
        text(&self.span.attributes, key)
    }

    /// The trace's id in hexadecimal.
    pub(crate) fn trace_id(&self) -> String {
        hex(&self.span.trace_id)
    }

    /// The span's id in hexadecimal.
    pub(crate) fn span_id(&self) -> String {
        hex(&self.span.span_id)
    }

    /// The parent span's id in hexadecimal; empty on a root.
    pub(crate) fn parent_id(&self) -> String {
        hex(&self.span.parent_span_id)
    }
}

fn text<'a>(attributes: &'a [KeyValue], key: &str) -> Option<&'a str> {
    let attribute = attributes.iter().find(|attribute| attribute.key == key)?;
    match attribute.value.as_ref()?.value.as_ref()? {
        Value::StringValue(text) => Some(text),
        _ => None,
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

struct Collector(Arc<Mutex<Vec<ReceivedSpan>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut spans = self.0.lock().unwrap();
        for sent in request.into_inner().resource_spans {
            let resource = sent.resource.unwrap_or_default().attributes;
            for span in sent.scope_spans.into_iter().flat_map(|scope| scope.spans) {
                spans.push(ReceivedSpan {
                    resource: resource.clone(),
                    span,
                });
            }
        }
        Ok(Response::new(ExportTraceServiceResponse {
            partial_success: None,
        }))
    }
}
