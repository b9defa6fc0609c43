//! Limits the nesting depth of the API server's responses to what the operator can parse.
//!
//! Where a resource keeps fields that its schema does not name, anyone with write access to one can nest values
//! thousands deep, and the API server stores it. kube parses JSON with serde_json, which fails beyond 127 levels, so
//! one such object would break the list of its kind for all namespaces. Values that are too deep are therefore replaced
//! by `null`.

use http::header::CONTENT_TYPE;
use http::{HeaderMap, Response};
use http_body_util::BodyExt;
use hyper::body::{Body, Bytes};

/// The number of levels that are kept, counted from the outermost. An object in a list has two fewer than an object on
/// its own. No field that the operator reads is a quarter as deep.
const MAX_DEPTH: usize = 100;

/// Returns the response with `null` in place of each value below [`MAX_DEPTH`]. A body that is not JSON is unchanged.
pub(super) fn response<B>(response: Response<B>) -> Response<impl Body<Data = Bytes, Error = B::Error> + use<B>>
where
    B: Body<Data = Bytes>,
{
    let mut cutter = is_json(response.headers()).then(Cutter::default);
    response.map(|body| {
        body.map_frame(move |frame| match &mut cutter {
            Some(cutter) => frame.map_data(|data| cutter.cut(data)),
            None => frame,
        })
    })
}

fn is_json(headers: &HeaderMap) -> bool {
    let content_type = headers.get(CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
    content_type.starts_with(b"application/json")
}

/// Scans a sequence of JSON texts that may be split anywhere.
#[derive(Default)]
struct Cutter {
    depth: usize,
    string: InString,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum InString {
    #[default]
    No,
    Yes,
    /// After a backslash.
    Escape,
}

impl Cutter {
    /// Returns the part of the next piece that is kept.
    fn cut(&mut self, data: Bytes) -> Bytes {
        let mut cut = Vec::new();
        // The start of the part to keep; `None` while everything is being cut.
        let mut start = (self.depth <= MAX_DEPTH).then_some(0);
        for (index, byte) in data.iter().enumerate() {
            let before = self.depth;
            self.step(*byte);
            if before == MAX_DEPTH && self.depth > MAX_DEPTH {
                cut.extend_from_slice(&data[start.take().unwrap_or(index)..index]);
                cut.extend_from_slice(b"null");
            } else if before > MAX_DEPTH && self.depth == MAX_DEPTH {
                start = Some(index + 1);
            }
        }
        match start {
            Some(0) => data,
            start => {
                cut.extend_from_slice(&data[start.unwrap_or(data.len())..]);
                cut.into()
            }
        }
    }

    fn step(&mut self, byte: u8) {
        self.string = match (self.string, byte) {
            (InString::No, b'"') | (InString::Escape, _) => InString::Yes,
            (InString::Yes, b'\\') => InString::Escape,
            (InString::Yes, b'"') => InString::No,
            (same, _) => same,
        };
        if self.string == InString::No {
            match byte {
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests;
