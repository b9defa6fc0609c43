//! `Debug` of the messages that carry prompts, responses and credentials: it shows lengths, never content. Logging a
//! message therefore leaks nothing.

use std::fmt;

use super::{Request, ResponseChunk, ResponseComplete, ResponseStart};

/// A number of hidden bytes, or headers.
struct Hidden(usize);

impl fmt::Debug for Hidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({} hidden)", self.0)
    }
}

fn length(text: &Option<String>) -> Option<Hidden> {
    text.as_ref().map(|text| Hidden(text.len()))
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            request_id,
            model,
            endpoint_path,
            is_streaming,
            body,
            headers,
            stream,
            method,
            content_length,
            window,
            wants_details,
            conversation,
            class,
        } = self;
        f.debug_struct("Request")
            .field("request_id", request_id)
            .field("model", model)
            // A query may contain private data.
            .field("endpoint_path", &endpoint_path.split('?').next().unwrap_or_default())
            .field("is_streaming", is_streaming)
            .field("body", &length(body))
            .field("headers", &Hidden(headers.len()))
            .field("stream", stream)
            .field("method", method)
            .field("content_length", content_length)
            .field("window", window)
            .field("wants_details", wants_details)
            .field("conversation", conversation)
            .field("class", class)
            .finish()
    }
}

impl fmt::Debug for ResponseChunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { request_id, chunk } = self;
        f.debug_struct("ResponseChunk").field("request_id", request_id).field("chunk", &Hidden(chunk.len())).finish()
    }
}

impl fmt::Debug for ResponseStart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { request_id, status_code, headers, content_length } = self;
        f.debug_struct("ResponseStart")
            .field("request_id", request_id)
            .field("status_code", status_code)
            .field("headers", &Hidden(headers.len()))
            .field("content_length", content_length)
            .finish()
    }
}

impl fmt::Debug for ResponseComplete {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { request_id, status_code, headers, body, token_counts, response_id, details } = self;
        f.debug_struct("ResponseComplete")
            .field("request_id", request_id)
            .field("status_code", status_code)
            .field("headers", &headers.as_ref().map(|headers| Hidden(headers.len())))
            .field("body", &length(body))
            .field("token_counts", token_counts)
            .field("response_id", response_id)
            .field("details", details)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLANTED: &str = "planted-word";

    #[test]
    fn debug_output_hides_content_of_messages() {
        let header = || (PLANTED.to_owned(), PLANTED.to_owned());
        let text = || Some(PLANTED.to_owned());
        let request = Request {
            request_id: "r-1".to_owned(),
            endpoint_path: format!("/v1/chat/completions?q={PLANTED}"),
            body: text(),
            headers: [header()].into(),
            ..Request::default()
        };
        let request_id = || "r-1".to_owned();
        let chunk = ResponseChunk { request_id: request_id(), chunk: PLANTED.to_owned() };
        let headers = vec![header()];
        let start = ResponseStart { request_id: request_id(), status_code: 200, headers, content_length: None };
        assert!(format!("{request:?}").contains("body: Some((12 hidden))"), "{request:?}");
        let headers = Some([header()].into());
        let complete =
            ResponseComplete { request_id: request_id(), headers, body: text(), ..ResponseComplete::default() };
        for printed in [format!("{request:?}"), format!("{chunk:?}"), format!("{start:#?}"), format!("{complete:?}")] {
            assert!(!printed.contains(PLANTED) && printed.contains("r-1") && printed.contains("hidden"), "{printed}");
        }
    }
}
