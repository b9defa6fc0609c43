//! The requests, and the relay's expected reaction to each.

use super::recorder::ForwardedRequest;

/// A program's reaction to a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reaction {
    /// It responded with this status, closed, and forwarded nothing, including the bytes that followed.
    Refuses(u16),
    /// It responded by itself, and parsed the bytes that followed as another request.
    Answers(u16),
    /// It forwarded one request with the usual body, and then the one that followed.
    Passes,
    /// It forwarded something else: this number of requests.
    Other(usize),
    /// As [`Reaction::Passes`], but it closed and read nothing of what followed.
    PassesAndCloses,
    /// It waits for more, whether or not it has responded (0 if not).
    Waits(u16),
}

impl Reaction {
    pub(super) fn of(status: u16, closed: bool, forwarded: &[ForwardedRequest]) -> Self {
        let bodies: Vec<_> = forwarded.iter().map(|request| request.body.as_str()).collect();
        match bodies.as_slice() {
            [] if closed => Self::Refuses(status),
            [] => Self::Waits(status),
            [AFTER_BODY] => Self::Answers(status),
            [BODY, AFTER_BODY] => Self::Passes,
            [BODY] if closed => Self::PassesAndCloses,
            others => Self::Other(others.len()),
        }
    }
}

/// A sequence of bytes.
pub(super) struct Case {
    pub(super) name: &'static str,
    /// With the abbreviations of [`Case::bytes`].
    raw: &'static str,
    pub(super) relay: Reaction,
    /// The programs that reject this, though the relay does not.
    pub(super) stricter: &'static [&'static str],
}

const BODY: &str = r#"{"model":"m"}"#;
const AFTER_BODY: &str = r#"{"model":"m","after":1}"#;

impl Case {
    /// Returns the bytes, followed by a valid request, which a program that loses count parses as something else. `{P}`
    /// stands for a request line and all headers but those of the framing, `{H}` for these headers, `{B}` for a body of
    /// 13 bytes, `{S}` for a whole request that is to be smuggled, `{L}` for a line's worth of 140,000 letters.
    pub(super) fn bytes(&self, number: usize) -> Vec<u8> {
        let headers = format!("host: x\r\ncontent-type: application/json\r\nx-request-id: case-{number:04}\r\n");
        let post = format!("POST /v1/chat/completions HTTP/1.1\r\n{headers}");
        let smuggled = format!("{post}content-length: 13\r\n\r\n{BODY}");
        let after = format!("{post}connection: close\r\ncontent-length: {}\r\n\r\n{AFTER_BODY}", AFTER_BODY.len());
        let raw = self.raw.replace("{P}", &post).replace("{H}", &headers).replace("{B}", BODY);
        let raw =
            raw.replace("{SLEN}", &smuggled.len().to_string()).replace("{SHEX}", &format!("{:x}", smuggled.len()));
        let raw = raw
            .replace("{S}", &smuggled)
            .replace("{L}", &"l".repeat(140_000))
            .replace("{N}", &format!("case-{number:04}"));
        (raw + &after).into_bytes()
    }
}

impl Case {
    const fn refused_by(self, stricter: &'static [&'static str]) -> Self {
        Self { stricter, ..self }
    }
}

const fn case(name: &'static str, raw: &'static str, relay: Reaction) -> Case {
    Case { name, raw, relay, stricter: &[] }
}

use Reaction::{Answers, Passes, PassesAndCloses, Refuses, Waits};

pub(super) const CASES: &[Case] = &[
    // Valid requests.
    case("content-length", "{P}content-length: 13\r\n\r\n{B}", Passes),
    case("chunked", "{P}transfer-encoding: chunked\r\n\r\nd\r\n{B}\r\n0\r\n\r\n", Passes),
    case("no body at all", "{P}\r\n", Answers(400)),
    // Two lengths.
    case(
        "CL then TE",
        "{P}content-length: 13\r\ntransfer-encoding: chunked\r\n\r\nd\r\n{B}\r\n0\r\n\r\n",
        PassesAndCloses,
    )
    .refused_by(&["nginx"]),
    case(
        "TE then CL",
        "{P}transfer-encoding: chunked\r\ncontent-length: 13\r\n\r\nd\r\n{B}\r\n0\r\n\r\n",
        PassesAndCloses,
    )
    .refused_by(&["nginx"]),
    case("CL.TE smuggling", "{P}content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n{S}", Refuses(400)),
    case(
        "TE.CL smuggling",
        "{P}content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n{SHEX}\r\n{S}\r\n0\r\n\r\n",
        Refuses(400),
    ),
    case("CL twice, equal", "{P}content-length: 13\r\ncontent-length: 13\r\n\r\n{B}", Passes).refused_by(&["nginx"]),
    case("CL twice, different", "{P}content-length: 13\r\ncontent-length: 14\r\n\r\n{B}", Refuses(400)),
    case("CL twice, the second smuggles", "{P}content-length: {SLEN}\r\ncontent-length: 0\r\n\r\n{S}", Refuses(400)),
    case("CL list, equal", "{P}content-length: 13, 13\r\n\r\n{B}", Refuses(400)),
    case("CL list, different", "{P}content-length: 13, 14\r\n\r\n{B}", Refuses(400)),
    // Invalid lengths.
    case("CL negative", "{P}content-length: -13\r\n\r\n{B}", Refuses(400)),
    case("CL with plus", "{P}content-length: +13\r\n\r\n{B}", Refuses(400)),
    case("CL hexadecimal", "{P}content-length: 0xd\r\n\r\n{B}", Refuses(400)),
    case("CL with letters", "{P}content-length: 13a\r\n\r\n{B}", Refuses(400)),
    case("CL with a space inside", "{P}content-length: 1 3\r\n\r\n{B}", Refuses(400)),
    case("CL with a fraction", "{P}content-length: 13.0\r\n\r\n{B}", Refuses(400)),
    case("CL empty", "{P}content-length: \r\n\r\n{B}", Refuses(400)),
    case("CL with leading zeros", "{P}content-length: 00013\r\n\r\n{B}", Passes),
    case("CL beyond 64 bits", "{P}content-length: 18446744073709551629\r\n\r\n{B}", Refuses(400)),
    case("CL of 64 bits", "{P}content-length: 18446744073709551615\r\n\r\n{B}", Refuses(431)),
    case("CL of 63 bits", "{P}content-length: 9223372036854775807\r\n\r\n{B}", Waits(413)),
    case("CL in quotes", "{P}content-length: \"13\"\r\n\r\n{B}", Refuses(400)),
    // Codings.
    case("TE in capitals", "{P}Transfer-Encoding: CHUNKED\r\n\r\nd\r\n{B}\r\n0\r\n\r\n", Passes),
    case("TE with blanks around", "{P}transfer-encoding:  \t chunked \t\r\n\r\nd\r\n{B}\r\n0\r\n\r\n", Passes)
        .refused_by(&["nginx"]),
    case("TE xchunked", "{P}transfer-encoding: xchunked\r\n\r\nd\r\n{B}\r\n0\r\n\r\n", Refuses(400)),
    case("TE chunkedx", "{P}transfer-encoding: chunkedx\r\n\r\nd\r\n{B}\r\n0\r\n\r\n", Refuses(400)),
    case("TE identity", "{P}transfer-encoding: identity\r\ncontent-length: 13\r\n\r\n{B}", Refuses(400)),
    case("TE gzip, chunked", "{P}transfer-encoding: gzip, chunked\r\n\r\nd\r\n{B}\r\n0\r\n\r\n", Refuses(400)),
    case("TE chunked, gzip", "{P}transfer-encoding: chunked, gzip\r\n\r\nd\r\n{B}\r\n0\r\n\r\n", Refuses(400)),
    case("TE chunked, chunked", "{P}transfer-encoding: chunked, chunked\r\n\r\nd\r\n{B}\r\n0\r\n\r\n", Refuses(400)),
    case(
        "TE twice",
        "{P}transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\nd\r\n{B}\r\n0\r\n\r\n",
        Refuses(400),
    ),
    case(
        "TE twice, identity last",
        "{P}transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\nd\r\n{B}\r\n0\r\n\r\n",
        Refuses(400),
    ),
    case(
        "TE twice, identity first",
        "{P}transfer-encoding: identity\r\ntransfer-encoding: chunked\r\n\r\nd\r\n{B}\r\n0\r\n\r\n",
        Refuses(400),
    ),
    case("TE in quotes", "{P}transfer-encoding: \"chunked\"\r\n\r\nd\r\n{B}\r\n0\r\n\r\n", Refuses(400)),
    case("TE with a parameter", "{P}transfer-encoding: chunked;q=1\r\n\r\nd\r\n{B}\r\n0\r\n\r\n", Refuses(400)),
    case("TE with a comma before", "{P}transfer-encoding: ,chunked\r\n\r\nd\r\n{B}\r\n0\r\n\r\n", Refuses(400)),
    case("TE with a vertical tab", "{P}transfer-encoding: \x0bchunked\r\n\r\nd\r\n{B}\r\n0\r\n\r\n", Refuses(400)),
    case("TE empty with CL", "{P}transfer-encoding: \r\ncontent-length: 13\r\n\r\n{B}", Refuses(400)),
    case("TE with an underscore", "{P}transfer_encoding: chunked\r\ncontent-length: 13\r\n\r\n{B}", Passes),
    case(
        "TE of HTTP/1.0",
        "POST /v1/chat/completions HTTP/1.0\r\n{H}transfer-encoding: chunked\r\n\r\nd\r\n{B}\r\n0\r\n\r\n",
        Refuses(400),
    ),
    case(
        "TE and CL of HTTP/1.0",
        "POST /v1/chat/completions HTTP/1.0\r\n{H}connection: keep-alive\r\ntransfer-encoding: chunked\r\ncontent-length: 13\r\n\r\n{B}",
        Refuses(400),
    ),
    // Header lines.
    case("space before the colon of CL", "{P}content-length : 13\r\n\r\n{B}", Refuses(400)),
    case(
        "space before the colon of TE",
        "{P}transfer-encoding : chunked\r\ncontent-length: 13\r\n\r\n{B}",
        Refuses(400),
    ),
    case(
        "tab before the colon of TE",
        "{P}transfer-encoding\t: chunked\r\ncontent-length: 13\r\n\r\n{B}",
        Refuses(400),
    ),
    case("a folded line", "{P}x-odd: a\r\n b\r\ncontent-length: 13\r\n\r\n{B}", Refuses(400)),
    case("a folded TE", "{P}transfer-encoding:\r\n chunked\r\n\r\nd\r\n{B}\r\n0\r\n\r\n", Refuses(400)),
    case(
        "a folded first line",
        "POST /v1/chat/completions HTTP/1.1\r\n content-length: 13\r\n{H}content-length: 13\r\n\r\n{B}",
        Refuses(400),
    ),
    case("no colon", "{P}transfer-encoding chunked\r\ncontent-length: 13\r\n\r\n{B}", Refuses(400)),
    case("no name", "{P}: chunked\r\ncontent-length: 13\r\n\r\n{B}", Refuses(400)),
    case("NUL in a value", "{P}x-odd: a\0b\r\ncontent-length: 13\r\n\r\n{B}", Refuses(400)),
    case("NUL in a name", "{P}x-o\0dd: a\r\ncontent-length: 13\r\n\r\n{B}", Refuses(400)),
    case("NUL behind CL", "{P}content-length: 13\0\r\n\r\n{B}", Refuses(400)),
    case(
        "bare CR in a value",
        "{P}x-odd: a\rtransfer-encoding: chunked\r\ncontent-length: 13\r\n\r\n{B}",
        Refuses(400),
    ),
    case("bare CR for a line's end", "{P}x-odd: a\rcontent-length: 13\r\n\r\n{B}", Refuses(400)),
    case("bare CR in the last line", "{P}content-length: 13\r\n\r{B}", Refuses(400)),
    case("bare LF for a line's end", "{P}x-odd: a\ncontent-length: 13\r\n\r\n{B}", Passes),
    case("bare LF before TE", "{P}x-odd: a\ntransfer-encoding: chunked\r\n\r\nd\r\n{B}\r\n0\r\n\r\n", Passes),
    case("bare LF for the empty line", "{P}content-length: 13\r\n\n{B}", Passes),
    case(
        "bare LF throughout",
        "POST /v1/chat/completions HTTP/1.1\nhost: x\nx-request-id: {N}\ncontent-length: 13\n\n{B}",
        Passes,
    ),
    case("letters beyond ASCII in a name", "{P}x-ödd: a\r\ncontent-length: 13\r\n\r\n{B}", Refuses(400)),
    case("letters beyond ASCII in a value", "{P}x-odd: ö\r\ncontent-length: 13\r\n\r\n{B}", Passes),
    case("two hosts", "{P}host: y\r\ncontent-length: 13\r\n\r\n{B}", Refuses(400)),
    case(
        "no host",
        "POST /v1/chat/completions HTTP/1.1\r\nx-request-id: {N}\r\ncontent-length: 13\r\n\r\n{B}",
        Refuses(400),
    ),
    case("connection names CL", "{P}connection: content-length\r\ncontent-length: 13\r\n\r\n{B}", Passes),
    case("a line of 140,000 letters", "{P}x-odd: {L}\r\ncontent-length: 13\r\n\r\n{B}", Refuses(431)),
    case(
        "a target of 140,000 letters",
        "POST /v1/chat/completions?{L} HTTP/1.1\r\n{H}content-length: 13\r\n\r\n{B}",
        Refuses(431),
    ),
    // Chunks.
    case("chunk extension", "{P}transfer-encoding: chunked\r\n\r\nd;a=b\r\n{B}\r\n0;c\r\n\r\n", Passes),
    case("chunk extension in quotes", "{P}transfer-encoding: chunked\r\n\r\nd;a=\"\\\"b\"\r\n{B}\r\n0\r\n\r\n", Passes),
    case("chunk extension with a bare LF", "{P}transfer-encoding: chunked\r\n\r\nd;a\n{B}\r\n0\r\n\r\n", Refuses(400)),
    case(
        "chunk extension with a bare CR",
        "{P}transfer-encoding: chunked\r\n\r\nd;a\rb\r\n{B}\r\n0\r\n\r\n",
        Refuses(400),
    ),
    case(
        "chunk extension of 140,000 letters",
        "{P}transfer-encoding: chunked\r\n\r\nd;{L}\r\n{B}\r\n0\r\n\r\n",
        Refuses(400),
    ),
    case("chunk size with zeros", "{P}transfer-encoding: chunked\r\n\r\n0000d\r\n{B}\r\n000\r\n\r\n", Passes),
    case("chunk size in capitals", "{P}transfer-encoding: chunked\r\n\r\nD\r\n{B}\r\n0\r\n\r\n", Passes),
    case("chunk size with 0x", "{P}transfer-encoding: chunked\r\n\r\n0xd\r\n{B}\r\n0\r\n\r\n", Refuses(400)),
    case("chunk size negative", "{P}transfer-encoding: chunked\r\n\r\n-d\r\n{B}\r\n0\r\n\r\n", Refuses(400)),
    case("chunk size with plus", "{P}transfer-encoding: chunked\r\n\r\n+d\r\n{B}\r\n0\r\n\r\n", Refuses(400)),
    case("chunk size with a blank before", "{P}transfer-encoding: chunked\r\n\r\n d\r\n{B}\r\n0\r\n\r\n", Refuses(400)),
    case("chunk size with a blank behind", "{P}transfer-encoding: chunked\r\n\r\nd \r\n{B}\r\n0\r\n\r\n", Passes),
    case("chunk size empty", "{P}transfer-encoding: chunked\r\n\r\n\r\n{B}\r\n0\r\n\r\n", Refuses(400)),
    case("chunk size of letters", "{P}transfer-encoding: chunked\r\n\r\nzz\r\n{B}\r\n0\r\n\r\n", Refuses(400)),
    case(
        "chunk size beyond 64 bits",
        "{P}transfer-encoding: chunked\r\n\r\n1000000000000000d\r\n{B}\r\n0\r\n\r\n",
        Refuses(400),
    ),
    case(
        "chunk size of 64 bits",
        "{P}transfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n{B}\r\n0\r\n\r\n",
        Waits(0),
    ),
    case("chunk size with a bare LF", "{P}transfer-encoding: chunked\r\n\r\nd\n{B}\r\n0\r\n\r\n", Refuses(400)),
    case("chunk longer than declared", "{P}transfer-encoding: chunked\r\n\r\nc\r\n{B}\r\n0\r\n\r\n", Refuses(400)),
    case("chunk without its line's end", "{P}transfer-encoding: chunked\r\n\r\nd\r\n{B}0\r\n\r\n", Refuses(400)),
    case("chunk with a bare LF behind", "{P}transfer-encoding: chunked\r\n\r\nd\r\n{B}\n0\r\n\r\n", Refuses(400)),
    case("trailers", "{P}transfer-encoding: chunked\r\n\r\nd\r\n{B}\r\n0\r\nx-trailer: 1\r\n\r\n", Passes),
    case(
        "trailers with framing",
        "{P}transfer-encoding: chunked\r\n\r\nd\r\n{B}\r\n0\r\ncontent-length: 99\r\n\r\n",
        Passes,
    ),
    case("last chunk with a bare LF", "{P}transfer-encoding: chunked\r\n\r\nd\r\n{B}\r\n0\n\n", Refuses(400)),
    // Request lines.
    case("HTTP/0.9", "GET /v1/models?{N}\r\n", Refuses(400)),
    case("HTTP/2.0", "POST /v1/chat/completions HTTP/2.0\r\n{H}content-length: 13\r\n\r\n{B}", Refuses(400)),
    case("HTTP/1.2", "POST /v1/chat/completions HTTP/1.2\r\n{H}content-length: 13\r\n\r\n{B}", Refuses(400)),
    case("HTTP/1.10", "POST /v1/chat/completions HTTP/1.10\r\n{H}content-length: 13\r\n\r\n{B}", Refuses(400)),
    case(
        "http/1.1 in small letters",
        "POST /v1/chat/completions http/1.1\r\n{H}content-length: 13\r\n\r\n{B}",
        Refuses(400),
    ),
    case("HTTP/2's preface", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Refuses(0)),
    case(
        "two blanks in the request line",
        "POST  /v1/chat/completions HTTP/1.1\r\n{H}content-length: 13\r\n\r\n{B}",
        Refuses(400),
    ),
    case(
        "a tab in the request line",
        "POST\t/v1/chat/completions HTTP/1.1\r\n{H}content-length: 13\r\n\r\n{B}",
        Refuses(400),
    ),
    case(
        "a blank in the target",
        "POST /v1/chat/completions x HTTP/1.1\r\n{H}content-length: 13\r\n\r\n{B}",
        Refuses(400),
    ),
    case("empty lines before", "\r\n\r\n{P}content-length: 13\r\n\r\n{B}", Passes),
    case("a blank before", " {P}content-length: 13\r\n\r\n{B}", Refuses(400)),
    case(
        "a method with a NUL",
        "PO\0ST /v1/chat/completions HTTP/1.1\r\n{H}content-length: 13\r\n\r\n{B}",
        Refuses(400),
    ),
    case(
        "a method in small letters",
        "post /v1/chat/completions HTTP/1.1\r\n{H}content-length: 13\r\n\r\n{B}",
        Answers(405),
    )
    .refused_by(&["nginx"]),
    case("absolute-form", "POST http://x/v1/chat/completions HTTP/1.1\r\n{H}content-length: 13\r\n\r\n{B}", Passes),
    case(
        "absolute-form of another host",
        "POST http://evil/v1/chat/completions HTTP/1.1\r\n{H}content-length: 13\r\n\r\n{B}",
        Passes,
    )
    .refused_by(&["haproxy"]),
    case("authority-form", "POST x:80 HTTP/1.1\r\n{H}content-length: 13\r\n\r\n{B}", Answers(404))
        .refused_by(&["nginx", "haproxy"]),
    case("asterisk-form", "POST * HTTP/1.1\r\n{H}content-length: 13\r\n\r\n{B}", Answers(404)).refused_by(&["nginx"]),
    case("no slash", "POST v1/chat/completions HTTP/1.1\r\n{H}content-length: 13\r\n\r\n{B}", Refuses(400)),
    case("two slashes", "POST //v1/chat/completions HTTP/1.1\r\n{H}content-length: 13\r\n\r\n{B}", Passes),
    case("dots", "POST /v1/x/../chat/completions HTTP/1.1\r\n{H}content-length: 13\r\n\r\n{B}", Answers(404)),
    case(
        "escaped dots",
        "POST /v1/x/%2e%2e/chat/completions HTTP/1.1\r\n{H}content-length: 13\r\n\r\n{B}",
        Answers(404),
    ),
    case("an escaped slash", "POST /v1%2fchat/completions HTTP/1.1\r\n{H}content-length: 13\r\n\r\n{B}", Answers(404)),
    case("an escaped letter", "POST /v1/ch%61t/completions HTTP/1.1\r\n{H}content-length: 13\r\n\r\n{B}", Answers(404)),
    case("an escaped NUL", "POST /v1/chat/completions%00 HTTP/1.1\r\n{H}content-length: 13\r\n\r\n{B}", Answers(404))
        .refused_by(&["nginx"]),
    case("a broken escape", "POST /v1/chat/completions%zz HTTP/1.1\r\n{H}content-length: 13\r\n\r\n{B}", Answers(404))
        .refused_by(&["nginx"]),
    case("a backslash", "POST /v1\\chat/completions HTTP/1.1\r\n{H}content-length: 13\r\n\r\n{B}", Answers(404)),
    case("a fragment", "POST /v1/chat/completions#/admin HTTP/1.1\r\n{H}content-length: 13\r\n\r\n{B}", Passes)
        .refused_by(&["haproxy"]),
    case("CONNECT", "CONNECT x:80 HTTP/1.1\r\n{H}\r\n", Answers(404)).refused_by(&["nginx"]),
    case("CONNECT with a body", "CONNECT x:80 HTTP/1.1\r\n{H}content-length: {SLEN}\r\n\r\n{S}", Answers(404))
        .refused_by(&["nginx"]),
    case("TRACE", "TRACE /v1/chat/completions HTTP/1.1\r\n{H}\r\n", Answers(405)).refused_by(&["nginx"]),
    case(
        "TRACE with a body",
        "TRACE /v1/chat/completions HTTP/1.1\r\n{H}content-length: {SLEN}\r\n\r\n{S}",
        Answers(405),
    )
    .refused_by(&["nginx"]),
    // A request inside another's body.
    case(
        "GET with a body that is a request",
        "GET /v1/models HTTP/1.1\r\n{H}content-length: {SLEN}\r\n\r\n{S}",
        Answers(200),
    ),
    case(
        "HEAD with a body that is a request",
        "HEAD /v1/models HTTP/1.1\r\n{H}content-length: {SLEN}\r\n\r\n{S}",
        Answers(200),
    ),
    case(
        "a refused body that is a request",
        "POST /nope HTTP/1.1\r\n{H}content-length: {SLEN}\r\n\r\n{S}",
        Answers(404),
    ),
    case(
        "a refused chunk that is a request",
        "POST /nope HTTP/1.1\r\n{H}transfer-encoding: chunked\r\n\r\n{SHEX}\r\n{S}\r\n0\r\n\r\n",
        Answers(404),
    ),
    case("a body that expects, unasked", "{P}expect: 100-continue\r\ncontent-length: 13\r\n\r\n{B}", Passes),
    case(
        "a refused body that expects, unasked",
        "POST /nope HTTP/1.1\r\n{H}expect: 100-continue\r\ncontent-length: {SLEN}\r\n\r\n{S}",
        Answers(404),
    ),
    case("an upgrade that is none", "{P}connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 13\r\n\r\n{B}", Passes),
    case(
        "an upgrade without its key",
        "GET /v1/worker/connect HTTP/1.1\r\n{H}connection: upgrade\r\nupgrade: websocket\r\n\r\n",
        Answers(400),
    )
    .refused_by(&["haproxy"]),
    case("a body that stops", "{P}content-length: 9999\r\n\r\n{B}", Waits(0)),
    case("chunks that stop", "{P}transfer-encoding: chunked\r\n\r\nfff\r\n{B}", Waits(0)),
];
