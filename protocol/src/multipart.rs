//! A minimal RFC 7578 parser that finds the `model` field of an upload.

use std::ops::Range;

use memchr::memmem;

/// Largest number of fields in one form; a transcription has about ten.
const MAX_FIELDS: usize = 1_000;

/// One field: its name, and the position of its value.
#[derive(Debug, PartialEq, Eq)]
pub struct Field {
    /// The name in its `Content-Disposition`.
    pub name: String,
    /// Without the line break before the next boundary.
    pub value: Range<usize>,
}

/// Returns the boundary of a `multipart/form-data` content type.
pub fn boundary(content_type: &str) -> Option<String> {
    let (kind, parameters) = content_type.split_once(';')?;
    if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    parameter(parameters, "boundary").filter(|boundary| !boundary.is_empty() && boundary.len() <= 70)
}

/// Returns all fields of an upload in memory, in order.
///
/// # Errors
/// Describes the problem with the form.
pub fn fields(boundary: &str, body: &[u8]) -> Result<Vec<Field>, &'static str> {
    let opening = format!("--{boundary}");
    let delimiter = format!("\r\n--{boundary}");
    let finder = memmem::Finder::new(delimiter.as_bytes());
    let mut at = if body.starts_with(opening.as_bytes()) {
        opening.len()
    } else {
        finder.find(body).ok_or("the boundary is missing")? + delimiter.len()
    };
    let mut fields = Vec::new();
    loop {
        let rest = &body[at..];
        if rest.starts_with(b"--") {
            return Ok(fields);
        }
        let line = memmem::find(rest, b"\r\n").ok_or("the form ends within a part")?;
        at += line + 2;
        let part = &body[at..];
        // A part without headers begins with the empty line itself.
        let (headers, value_at) = if part.starts_with(b"\r\n") {
            (&part[..0], at + 2)
        } else {
            let end = memmem::find(part, b"\r\n\r\n").ok_or("the form ends within a part's headers")?;
            (&part[..end], at + end + 4)
        };
        if is_ambiguous(headers) {
            return Err("the name of a part is ambiguous");
        }
        let value_len = finder.find(&body[value_at..]).ok_or("the form ends within a part")?;
        if let Some(name) = field_name(headers) {
            fields.push(Field { name, value: value_at..value_at + value_len });
        }
        if fields.len() > MAX_FIELDS {
            return Err("the form has too many fields");
        }
        at = value_at + value_len + delimiter.len();
    }
}

/// Returns the name of the part with these headers, if it has one.
pub fn field_name(headers: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(headers);
    let disposition = dispositions(&text).next()?;
    parameter(disposition.split_once(';')?.1, "name")
}

/// True if other parsers may read another name from these headers than [`field_name`] does: the name is repeated, split
/// or encoded (`name*`), or headers are folded.
fn is_ambiguous(headers: &[u8]) -> bool {
    let text = String::from_utf8_lossy(headers);
    let is_folded = text.split("\r\n").any(|line| line.starts_with([' ', '\t']));
    let names = |disposition| {
        let names = parameters(disposition).map(|(name, _)| name.to_ascii_lowercase());
        names.filter(|name| name == "name" || name.starts_with("name*")).collect::<Vec<_>>()
    };
    let all: Vec<String> =
        dispositions(&text).filter_map(|value| Some(names(value.split_once(';')?.1))).flatten().collect();
    is_folded || dispositions(&text).count() > 1 || all.len() > 1 || all.iter().any(|name| name != "name")
}

/// The values of `Content-Disposition`.
fn dispositions(headers: &str) -> impl Iterator<Item = &str> {
    headers.split("\r\n").filter_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.trim().eq_ignore_ascii_case("content-disposition").then_some(value)
    })
}

/// Returns a header parameter that occurs exactly once.
fn parameter(text: &str, wanted: &str) -> Option<String> {
    let mut found = parameters(text).filter(|(name, _)| name.eq_ignore_ascii_case(wanted));
    let (_, value) = found.next()?;
    found.next().is_none().then(|| value.to_owned())
}

/// The name and value of each parameter, quoted or not.
fn parameters(mut rest: &str) -> impl Iterator<Item = (&str, &str)> {
    std::iter::from_fn(move || {
        let (name, after) = rest.split_once('=')?;
        let (value, after) = match after.trim_start().strip_prefix('"') {
            Some(quoted) => quoted.split_once('"')?,
            None => after.split_once(';').unwrap_or((after, "")),
        };
        rest = after;
        Some((name.trim().trim_start_matches(';').trim(), value.trim()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boundary_is_found_quoted_or_unquoted() {
        assert_eq!(boundary("multipart/form-data; boundary=abc").as_deref(), Some("abc"));
        assert_eq!(boundary("Multipart/Form-Data; charset=x; boundary=\"a b\"").as_deref(), Some("a b"));
        assert_eq!(boundary("application/json"), None);
        assert_eq!(boundary("multipart/mixed; boundary=abc"), None);
        assert_eq!(boundary("multipart/form-data; boundary="), None);
        assert_eq!(boundary("multipart/form-data; boundary=abc; boundary=def"), None);
    }

    #[test]
    fn ambiguous_field_name_is_rejected() {
        let of = |headers: &str| {
            let body = format!("--B\r\n{headers}\r\n\r\nv\r\n--B--");
            fields("B", body.as_bytes()).map(|fields| fields.into_iter().map(|field| field.name).collect::<Vec<_>>())
        };
        let disposition = "Content-Disposition: form-data";
        assert_eq!(of(&format!("{disposition}; name=\"model\"; filename=\"name=x\"")), Ok(vec!["model".to_owned()]));
        assert_eq!(of("X-Odd: \u{fffd}"), Ok(Vec::new()));
        for odd in [
            "; name=model; name=other".to_owned(),
            "; name=x; NAME=\"model\"".to_owned(),
            "; name=\"x\\\"; name=\\\"model\"".to_owned(),
            "; name*=utf-8''model".to_owned(),
            "; name=x; name*=utf-8''model".to_owned(),
            "; name*0=mo; name*1=del".to_owned(),
            ";\r\n name=model".to_owned(),
            format!("; name=x\r\n{disposition}; name=model"),
        ] {
            assert!(of(&format!("{disposition}{odd}")).is_err(), "{odd:?}");
        }
    }

    #[test]
    fn binary_part_header_does_not_hide_name() {
        let body = b"--B\r\nX: \xff\r\ncontent-disposition: form-data; name=model\r\n\r\nv\r\n--B--";
        assert_eq!(fields("B", body).unwrap()[0].name, "model");
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
    fn text_before_first_boundary_is_ignored() {
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
    fn spaces_after_boundary_are_accepted() {
        let body = b"--B          \r\nContent-Disposition: form-data; name=f\r\n\r\nv\r\n--B--";
        assert_eq!(fields("B", body).map(|found| found[0].name.clone()), Ok("f".to_owned()));
    }

    #[test]
    fn form_with_over_thousand_fields_is_rejected() {
        let form = |parts: usize| {
            let part = "--B\r\nContent-Disposition: form-data; name=f\r\n\r\nv\r\n";
            format!("{}--B--", part.repeat(parts)).into_bytes()
        };
        assert_eq!(fields("B", &form(1_000)).map(|fields| fields.len()), Ok(1_000));
        assert_eq!(fields("B", &form(1_001)), Err("the form has too many fields"));
    }

    #[test]
    fn truncated_form_is_rejected_at_every_cut() {
        let body = b"--B\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--B--";
        for cut in 0..body.len() {
            assert!(fields("B", &body[..cut]).is_err(), "cut at {cut}");
        }
        assert_eq!(fields("B", body).unwrap().len(), 1);
        assert!(fields("B", b"--B\r\n\r\n--B--").is_err(), "a line without headers, and no value");
    }
}
