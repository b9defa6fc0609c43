//! No answer of the API server is deeper than what we can read.
//!
//! Where a resource keeps fields that its schema does not name, whoever may write one can nest values thousands deep, and the
//! API server stores it. kube reads JSON with serde_json, which gives up behind 127 levels: one such object would break the
//! list of its kind, for all namespaces. So what is too deep comes as `null`.

use http::header::CONTENT_TYPE;
use http::{HeaderMap, Response};
use http_body_util::BodyExt;
use hyper::body::{Body, Bytes};

/// Levels that stay, counted from the outermost: of an object two fewer in a list than alone. No field that anybody reads is a
/// quarter as deep.
const MAX_DEPTH: usize = 100;

/// The answer, with `null` for each value below [`MAX_DEPTH`]. What is no JSON stays as it is.
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

/// Follows one JSON text after the other, cut into pieces anywhere.
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
    /// Behind a backslash.
    Escape,
}

impl Cutter {
    /// What stays of the next piece.
    fn cut(&mut self, data: Bytes) -> Bytes {
        let mut cut = Vec::new();
        // Where what stays begins, unless all up to here goes.
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
