use proptest::prelude::*;

use super::*;

const BOUNDARY: &str = "multipart/form-data; boundary=B";

/// Returns the body after renaming, fed in pieces of this size.
fn renamed(content_type: Option<&str>, body: &[u8], (requested, name): (&str, &str), size: usize) -> Vec<u8> {
    let mut renamer = Renamer::new(content_type, requested, name);
    let length = renamer.length(body.len() as u64);
    let mut after = Vec::new();
    let mut pass = |piece: Bytes| after.extend_from_slice(&piece);
    for piece in body.chunks(size.max(1)) {
        renamer.push(Bytes::copy_from_slice(piece), &mut pass);
    }
    renamer.finish(&mut pass);
    assert_eq!(after.len() as u64, length, "{}", String::from_utf8_lossy(&after));
    after
}

/// Checks that every piece size gives the same result.
fn json(body: &str, names: (&str, &str)) -> String {
    let whole = renamed(Some("application/json"), body.as_bytes(), names, body.len());
    for size in 1..body.len() {
        assert_eq!(renamed(None, body.as_bytes(), names, size), whole, "in pieces of {size}");
    }
    String::from_utf8(whole).unwrap()
}

#[test]
fn longer_name_replaces_requested_one_and_nothing_else() {
    let body = r#" {"x":"\u0041\"", "model" : "qwen" ,"y":1.0, "messages":[{"model":"qwen"}], "z":"model"} "#;
    let after = json(body, ("qwen", "Qwen/Qwen3-8B"));
    assert_eq!(after, body.replacen("\"qwen\"", "\"Qwen/Qwen3-8B\"", 1));
}

#[test]
fn shorter_name_is_padded_with_spaces() {
    assert_eq!(json(r#"{"model":"claude","n":1}"#, ("claude", "q")), r#"{"model":"q"     ,"n":1}"#);
    // Escapes that were not needed make the old value longer than the name.
    assert_eq!(json(r#"{"mod\u0065l":"a\u002fb"}"#, ("a/b", "long")), r#"{"mod\u0065l":"long"     }"#);
    assert_eq!(json(r#"{"model":"a"}"#, ("a", "say \"x\"")), r#"{"model":"say \"x\""}"#);
    let key = r"\u006d\u006f\u0064\u0065\u006c";
    assert_eq!(json(&format!(r#"{{"{key}":"q"}}"#), ("q", "p")), format!(r#"{{"{key}":"p"}}"#));
}

#[test]
fn only_top_level_model_is_renamed() {
    for body in [
        r#"{"a":{"model":"q"},"b":["model","q",{"model":"q"}]}"#,
        r#"["model","q"]"#,
        r#"{"a":"model","model":7,"x":"q"}"#,
        r#"{"model":{"q":"q"},"a":"q"}"#,
        r#"{"models":"q","modelmodelmodelmodelmodelmodelmodel":"q"}"#,
        "\"model\"",
        "",
        r#"{"model"#,
        r#"{"model":"q"#,
        r#"{}{"model":"q"}"#,
    ] {
        assert_eq!(json(body, ("q", "long")), format!("{body}   "), "{body}");
    }
}

#[test]
fn other_name_without_room_stays() {
    assert_eq!(json(r#"{"model":"x","n":1}"#, ("qwen3", "Qwen3-8B")), r#"{"model":"x","n":1}   "#);
}

#[test]
fn only_piece_with_name_is_split() {
    let mut renamer = Renamer::new(None, "q", "long");
    let pieces = [r#"{"a":"xxxxxxxx","#, r#""model":"q","b":""#, "yyyyyyy\"}"].map(Bytes::from);
    let mut after = Vec::new();
    for piece in &pieces {
        renamer.push(piece.clone(), &mut |piece| after.push(piece));
    }
    renamer.finish(&mut |piece| after.push(piece));
    assert_eq!((after.first().unwrap().as_ptr(), after.first().unwrap().len()), (pieces[0].as_ptr(), 16));
    assert!(after.iter().any(|piece| piece.as_ptr() == pieces[2].as_ptr()));
}

#[test]
fn model_of_form_is_replaced_however_split() {
    let body = b"--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\n\xff\r\n--\r\n-B\r\n\
        --B\r\ncontent-disposition: form-data; name=model\r\nX: y\r\n\r\nwhisper\r\n\
        --B\r\n\r\nno name\r\n--B\r\nContent-Disposition: form-data; name=\"n\"\r\n\r\nwhisper\r\n--B--\r\n";
    let expected = |name: &str| {
        let at = memchr::memmem::find(body, b"whisper").unwrap();
        [&body[..at], name.as_bytes(), &body[at + 7..]].concat()
    };
    for name in ["openai/whisper-large-v3", "w", "whisper"] {
        for size in 1..=body.len() {
            assert_eq!(renamed(Some(BOUNDARY), body, ("whisper", name), size), expected(name), "in pieces of {size}");
        }
    }
}

#[test]
fn truncated_form_is_forwarded_to_its_end() {
    cut_off(b"--B\r\nContent-Disposition: form-data; name=model\r\n\r\nwhisper\r\n--B--");
    cut_off(b"--B  \r\n\r\n\r\n--B\r\nContent-Disposition: form-data; name=model\r\n\r\nwhisper\r\n--B--");
}

fn cut_off(body: &[u8]) {
    let value = memchr::memmem::find(body, b"whisper").unwrap();
    let whole = [&body[..value], b"WHISPER", &body[value + 7..]].concat();
    for cut in 0..=body.len() {
        // The whole new name replaces the beginning of the old one.
        let end = if (value..value + 7).contains(&cut) { value + 7 } else { cut };
        for size in 1..=body.len() {
            let mut renamer = Renamer::new(Some(BOUNDARY), "whisper", "WHISPER");
            let mut after = Vec::new();
            let mut pass = |piece: Bytes| after.extend_from_slice(&piece);
            for piece in body[..cut].chunks(size) {
                renamer.push(Bytes::copy_from_slice(piece), &mut pass);
            }
            renamer.finish(&mut pass);
            assert_eq!(String::from_utf8_lossy(&after), String::from_utf8_lossy(&whole[..end]), "{cut}, {size}");
        }
    }
}

#[test]
fn endless_headers_are_released_and_files_not_copied() {
    let mut renamer = Renamer::new(Some(BOUNDARY), "q", "long");
    let mut after = Vec::new();
    renamer
        .push(Bytes::from("--B\r\nContent-Disposition: form-data; name=file\r\n\r\n"), &mut |piece| after.push(piece));
    let file = Bytes::from(vec![b'x'; 1_000]);
    renamer.push(file.clone(), &mut |piece| after.push(piece));
    assert_eq!(after.last().map(|piece| (piece.as_ptr(), piece.len())), Some((file.as_ptr(), 1_000)));
    renamer.push(Bytes::from("\r\n--B\r\nX: "), &mut |piece| after.push(piece));
    for _ in 0..70 {
        renamer.push(file.clone(), &mut |piece| after.push(piece));
    }
    let passed = after.iter().map(Bytes::len).sum::<usize>();
    assert!(passed > 70_000, "{passed}");
}

#[test]
fn form_with_preamble_is_renamed() {
    let body = b"hello\r\n--B\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n\r\n--B--";
    let after = renamed(Some(BOUNDARY), body, ("", "m"), 3);
    assert!(after.ends_with(b"\r\n\r\nm\r\n--B--"), "{}", String::from_utf8_lossy(&after));
}

proptest! {
    /// A reader finds the new name in place of the old one and everything else unchanged, whatever surrounds it.
    #[test]
    fn only_model_name_changes_for_reader(
        before in prop::collection::vec(("[a-z\"\\\\é]{0,9}", "[a-z:{}\\[\\],\"\\\\é]{0,9}"), 0..4),
        requested in "[a-z/\"\\\\é]{1,9}",
        name in "[a-zA-Z/\"\\\\é]{1,20}",
        pretty in any::<bool>(),
        size in 1..40_usize,
    ) {
        let mut object = serde_json::Map::new();
        for (key, value) in before.into_iter().filter(|(key, _)| key != "model") {
            object.insert(key, serde_json::json!([value, {"model": requested}]));
        }
        object.insert("model".to_owned(), requested.as_str().into());
        let body = if pretty { serde_json::to_vec_pretty(&object) } else { serde_json::to_vec(&object) }.unwrap();
        let after = renamed(None, &body, (&requested, &name), size);
        let after: serde_json::Value = serde_json::from_slice(&after).unwrap();
        object.insert("model".to_owned(), name.into());
        prop_assert_eq!(after, serde_json::Value::Object(object));
    }
}
