//! API servers that tests play.

use http::{Request, Response};
use http_body_util::BodyExt;
use kube::Client;
use kube::client::Body;
use serde_json::Value;

/// Returns a client of an API server that responds with `answer(method, path, body)`: a status code and an object. It
/// lives as long as the test's runtime.
pub(crate) fn client(
    namespace: &str,
    mut answer: impl FnMut(&str, &str, Value) -> (u16, Value) + Send + 'static,
) -> Client {
    let (service, mut handle) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
    tokio::spawn(async move {
        while let Some((request, reply)) = handle.next_request().await {
            let (parts, body) = request.into_parts();
            let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
            let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
            let (status, object) = answer(parts.method.as_str(), parts.uri.path(), body);
            let object = Body::from(object.to_string().into_bytes());
            reply.send_response(Response::builder().status(status).body(object).unwrap());
        }
    });
    Client::new(service, namespace)
}
