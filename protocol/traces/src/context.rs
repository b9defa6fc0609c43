//! W3C trace context: the trace that a request belongs to.
//!
//! Parsing is strict, because the headers come from any client: a malformed `traceparent` is ignored, and a new trace
//! begins. A `tracestate` is used only with a valid `traceparent`.

use std::str::FromStr;

use opentelemetry::trace::{SpanContext, SpanId, TraceFlags, TraceId, TraceState};

/// The header with the trace and the caller's span.
pub const TRACEPARENT: &str = "traceparent";
/// The header with the data of tracing systems.
pub const TRACESTATE: &str = "tracestate";

/// The caller's span, in another process.
#[derive(Clone, Debug, PartialEq)]
pub struct Parent(pub(crate) SpanContext);

impl Parent {
    /// Reads both headers. Returns `None` for several `traceparent` headers, or a malformed one.
    pub fn read(traceparent: Option<&str>, tracestate: Option<&str>) -> Option<Self> {
        let (trace, span, flags) = fields(traceparent?.trim_matches([' ', '\t']))?;
        let state = tracestate.and_then(|text| TraceState::from_str(text).ok()).unwrap_or_default();
        let context = SpanContext::new(trace, span, flags, true, state);
        context.is_valid().then_some(Self(context))
    }
}

/// The trace headers of a request that is sent under this span.
pub(crate) fn headers(of: &SpanContext) -> [(&'static str, String); 2] {
    let sampled = u8::from(of.is_sampled());
    let parent = format!("00-{}-{}-{sampled:02x}", of.trace_id(), of.span_id());
    [(TRACEPARENT, parent), (TRACESTATE, of.trace_state().header())]
}

/// Parses `VERSION-TRACE-SPAN-FLAGS`. Only later versions may append fields.
fn fields(text: &str) -> Option<(TraceId, SpanId, TraceFlags)> {
    let mut parts = text.split('-');
    let version = hex(parts.next()?, 2)?;
    let (trace, span, flags) = (hex(parts.next()?, 32)?, hex(parts.next()?, 16)?, hex(parts.next()?, 2)?);
    if version == 0xff || version == 0 && parts.next().is_some() {
        return None;
    }
    let sampled = if flags & 1 == 1 { TraceFlags::SAMPLED } else { TraceFlags::NOT_SAMPLED };
    Some((TraceId::from(trace), SpanId::from(u64::try_from(span).ok()?), sampled))
}

/// Parses a number of exactly `digits` lower-case hexadecimal digits.
fn hex(text: &str, digits: usize) -> Option<u128> {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    (text.len() == digits && text.bytes().all(is_digit)).then(|| u128::from_str_radix(text, 16).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    const SPAN: &str = "00f067aa0ba902b7";

    #[test]
    fn trace_context_survives_round_trip() {
        let text = format!("00-{TRACE}-{SPAN}-01");
        let parent = Parent::read(Some(&text), Some("a=1,b=2")).expect("a context");
        assert!(parent.0.is_sampled() && parent.0.is_remote());
        assert_eq!(headers(&parent.0), [(TRACEPARENT, text), (TRACESTATE, "a=1,b=2".to_owned())]);
    }

    #[test]
    fn malformed_traceparent_is_ignored() {
        let malformed = [
            String::new(),
            "nonsense".to_owned(),
            format!("00-{TRACE}-{SPAN}"),
            format!("00-{TRACE}-{SPAN}-01-more"),
            format!("ff-{TRACE}-{SPAN}-01"),
            format!("00-{}-{SPAN}-01", TRACE.to_uppercase()),
            format!("00-{}-{SPAN}-01", &TRACE[1..]),
            format!("00-+{}-{SPAN}-01", &TRACE[1..]),
            format!("00-{}-{SPAN}-01", "0".repeat(32)),
            format!("00-{TRACE}-{}-01", "0".repeat(16)),
            format!("00-{TRACE}-{SPAN}-1"),
            format!("00-{TRACE}-{SPAN}-01, 00-{TRACE}-{SPAN}-01"),
            format!("00-{TRACE}-{SPAN}-0é"),
        ];
        for text in malformed {
            assert_eq!(Parent::read(Some(&text), Some("a=1")), None, "{text:?}");
        }
        assert_eq!(Parent::read(None, Some("a=1")), None);
    }

    #[test]
    fn later_version_is_accepted_and_malformed_state_dropped() {
        let parent = Parent::read(Some(&format!("01-{TRACE}-{SPAN}-00-more")), Some("a=1=,,=")).expect("a context");
        assert!(!parent.0.is_sampled());
        assert_eq!(headers(&parent.0)[1].1, "");
    }
}
