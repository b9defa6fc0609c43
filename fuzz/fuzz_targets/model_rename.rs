//! The model's name in a request's body: found and replaced with every other byte kept, in memory at the relay and in
//! passing at the worker.

#![no_main]

use arbitrary::Arbitrary;
use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use modelrelay_fuzz::Cuts;
use modelrelay_protocol::multipart;
use modelrelay_protocol::rename::Renamer;
use modelrelay_relay::clients::parse::{Routed, parse, with_model};

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    content_type: ContentType,
    name: Vec<u8>,
    cuts: Cuts,
    body: &'a [u8],
}

#[derive(Arbitrary, Debug)]
enum ContentType {
    Json,
    Form,
    Any(Vec<u8>),
}

fuzz_target!(|input: Input<'_>| {
    let content_type = match &input.content_type {
        ContentType::Json => "application/json".into(),
        ContentType::Form => "multipart/form-data; boundary=B".into(),
        ContentType::Any(text) => String::from_utf8_lossy(text),
    };
    let content_type = content_type.as_ref();
    let name = &*String::from_utf8_lossy(&input.name);
    let is_form = multipart::boundary(content_type).is_some();
    let body = Bytes::copy_from_slice(input.body);
    // A name that a configuration accepts.
    let is_name = !name.is_empty() && name.trim() == name && !name.contains(char::is_control);
    if is_name
        && let Ok(routed) = parse(Some(content_type), &body, Some(name))
        && routed.names_no_model()
    {
        let named = parse(Some(content_type), &with_model(&body, &routed, name), None).expect("it can still be read");
        assert_eq!((named.model.as_str(), named.needs_rewrite(name)), (name, false));
    }
    let routed = parse(Some(content_type), &body, None);
    if let (Ok(routed), true) = (&routed, is_name) {
        let place = place_of(&body, routed, is_form);
        let replaced = with_model(&body, routed, name);
        let spelled = if is_form { name.to_owned() } else { serde_json::Value::from(name).to_string() };
        let end = place + spelled.len();
        assert_eq!(replaced[..place], body[..place]);
        assert_eq!(replaced[place..end], *spelled.as_bytes());
        assert!(body[place..].ends_with(&replaced[end..]));

        let again = parse(Some(content_type), &replaced, None).expect("it can still be read");
        assert_eq!(again.model, name);
        assert_eq!((again.stream, &again.previous_response_id), (routed.stream, &routed.previous_response_id));

        let renamer = Renamer::new(Some(content_type), &routed.model, name);
        let announced = renamer.length(body.len() as u64);
        let passed = run(renamer, input.cuts.of(input.body));
        assert_eq!(announced, passed.len() as u64, "another length than was announced");
        // Only spaces after the name may differ.
        let spaces = passed.len().checked_sub(replaced.len()).expect("nothing is lost");
        assert_eq!(passed[..end], replaced[..end]);
        assert!(passed[end..end + spaces].iter().all(|byte| *byte == b' '));
        assert_eq!(passed[end + spaces..], replaced[end..]);
    }
    // Even for an invalid body, the cuts change nothing.
    let requested = routed.as_ref().map_or("model", |routed| routed.model.as_str());
    let whole = run(Renamer::new(Some(content_type), requested, name), std::iter::once(input.body));
    assert_eq!(run(Renamer::new(Some(content_type), requested, name), input.cuts.of(input.body)), whole);
    assert_eq!(run(Renamer::new(Some(content_type), requested, name), input.body.chunks(1)), whole);
});

/// The position of the model's name, in JSON of its quote: two names of one letter differ in one byte.
fn place_of(body: &Bytes, routed: &Routed, is_form: bool) -> usize {
    let (one, other) = (with_model(body, routed, "1"), with_model(body, routed, "2"));
    let differing: Vec<usize> = (0..one.len()).filter(|&at| one[at] != other[at]).collect();
    let [at] = differing[..] else { panic!("{} bytes differ", differing.len()) };
    at - usize::from(!is_form)
}

fn run<'a>(mut renamer: Renamer, pieces: impl Iterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut passed = Vec::new();
    let mut pass = |piece: Bytes| passed.extend_from_slice(&piece);
    pieces.for_each(|piece| renamer.push(Bytes::copy_from_slice(piece), &mut pass));
    renamer.finish(&mut pass);
    passed
}
