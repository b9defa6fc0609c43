//! Just enough of RFC 7578 to find the `model` field of an upload.

use std::ops::Range;

use memchr::memmem;

/// Fields of one form at most; a transcription has about ten.
const MAX_FIELDS: usize = 1_000;

/// One field: its name, and where its value stands.
#[derive(Debug, PartialEq, Eq)]
pub struct Field {
    /// What its `Content-Disposition` says.
    pub name: String,
    /// Without the line break before the next boundary.
    pub value: Range<usize>,
}

/// The boundary of a `multipart/form-data` content type.
pub fn boundary(content_type: &str) -> Option<String> {
    let (kind, parameters) = content_type.split_once(';')?;
    if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    parameter(parameters, "boundary").filter(|boundary| !boundary.is_empty() && boundary.len() <= 70)
}

/// All fields of an upload that is in memory, in order.
///
/// # Errors
/// Says what is wrong with the form.
pub fn fields(boundary: &str, body: &[u8]) -> Result<Vec<Field>, &'static str> {
    let opening = format!("--{boundary}");
    let delimiter = format!("\r\n--{boundary}");
    let finder = memmem::Finder::new(delimiter.as_bytes());
    let mut at = if body.starts_with(opening.as_bytes()) {
        opening.len()
    } else {
        finder.find(body).ok_or("its boundary is missing")? + delimiter.len()
    };
    let mut fields = Vec::new();
    loop {
        let rest = &body[at..];
        if rest.starts_with(b"--") {
            return Ok(fields);
        }
        let line = memmem::find(rest, b"\r\n").ok_or("it ends within a part")?;
        at += line + 2;
        let part = &body[at..];
        // A part without headers begins with the empty line itself.
        let (headers, value_at) = if part.starts_with(b"\r\n") {
            (&part[..0], at + 2)
        } else {
            let end = memmem::find(part, b"\r\n\r\n").ok_or("it ends within a part's headers")?;
            (&part[..end], at + end + 4)
        };
        let value_len = finder.find(&body[value_at..]).ok_or("it ends within a part")?;
        if let Some(name) = field_name(headers) {
            fields.push(Field { name, value: value_at..value_at + value_len });
        }
        if fields.len() > MAX_FIELDS {
            return Err("it has too many fields");
        }
        at = value_at + value_len + delimiter.len();
    }
}

/// The name of the part with these headers, if it has one.
pub fn field_name(headers: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(headers).ok()?;
    let disposition = text.split("\r\n").find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.trim().eq_ignore_ascii_case("content-disposition").then_some(value)
    })?;
    parameter(disposition.split_once(';')?.1, "name")
}

/// One parameter of a header's value, quoted or not.
fn parameter(mut parameters: &str, wanted: &str) -> Option<String> {
    loop {
        let (name, rest) = parameters.split_once('=')?;
        let (value, rest) = match rest.trim_start().strip_prefix('"') {
            Some(quoted) => quoted.split_once('"')?,
            None => rest.split_once(';').map_or((rest, ""), |(value, rest)| (value, rest)),
        };
        let name = name.trim().trim_start_matches(';').trim();
        if name.eq_ignore_ascii_case(wanted) {
            return Some(value.trim().to_owned());
        }
        parameters = rest;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_boundary_is_found_quoted_or_not() {
        assert_eq!(boundary("multipart/form-data; boundary=abc").as_deref(), Some("abc"));
        assert_eq!(boundary("Multipart/Form-Data; charset=x; boundary=\"a b\"").as_deref(), Some("a b"));
        assert_eq!(boundary("application/json"), None);
        assert_eq!(boundary("multipart/mixed; boundary=abc"), None);
        assert_eq!(boundary("multipart/form-data; boundary="), None);
    }

    #[test]
    fn fields_are_found_between_binary_parts() {
        let body =
            b"preamble\r\n--B\r\ncontent-disposition: form-data; filename=\"name=\"; name=f\r\n\r\n--\r\n--\xff\r\n\
            --B \r\nContent-Disposition: form-data; name=\"model\"\r\nX: y\r\n\r\n\r\n--B\r\n\r\nanonymous\r\n--B--";
        let found = fields("B", body).unwrap();
        let found: Vec<_> = found.iter().map(|f| (f.name.as_str(), &body[f.value.clone()])).collect();
        assert_eq!(found, [("f", &b"--\r\n--\xff"[..]), ("model", b"")]);
    }

    #[test]
    fn what_comes_before_the_first_boundary_is_no_part() {
        let boundary = "B".repeat(70);
        let body = format!(
            "x\r\n\r\nContent-Disposition: form-data; name=no\r\nA: it is no header either\r\n\
            --{boundary}\r\nContent-Disposition: form-data; name=yes\r\n\r\nv\r\n--{boundary}--"
        );
        let found = fields(&boundary, body.as_bytes()).unwrap();
        assert_eq!(found.iter().map(|f| f.name.as_str()).collect::<Vec<_>>(), ["yes"]);
        assert_eq!(&body[found[0].value.clone()], "v");
    }

    #[test]
    fn spaces_may_follow_a_boundary() {
        let body = b"--B          \r\nContent-Disposition: form-data; name=f\r\n\r\nv\r\n--B--";
        assert_eq!(fields("B", body).map(|found| found[0].name.clone()), Ok("f".to_owned()));
    }

    #[test]
    fn a_form_has_a_thousand_fields_at_most() {
        let form = |parts: usize| {
            let part = "--B\r\nContent-Disposition: form-data; name=f\r\n\r\nv\r\n";
            format!("{}--B--", part.repeat(parts)).into_bytes()
        };
        assert_eq!(fields("B", &form(1_000)).map(|fields| fields.len()), Ok(1_000));
        assert_eq!(fields("B", &form(1_001)), Err("it has too many fields"));
    }

    #[test]
    fn a_torn_form_is_an_error_at_every_cut() {
        let body = b"--B\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--B--";
        for cut in 0..body.len() {
            assert!(fields("B", &body[..cut]).is_err(), "cut at {cut}");
        }
        assert_eq!(fields("B", body).unwrap().len(), 1);
        assert!(fields("B", b"--B\r\n\r\n--B--").is_err(), "a line without headers, and no value");
    }
}
