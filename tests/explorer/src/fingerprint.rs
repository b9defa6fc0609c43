//! MurmurHash3 in its variant for 128 bits: fast, and good enough against accidents.

const FIRST: u64 = 0x87c3_7b91_1142_53d5;
const SECOND: u64 = 0x4cf5_ad43_2745_937f;

/// Returns the fingerprint of a text.
#[must_use]
pub fn fingerprint(text: &[u8]) -> u128 {
    let (mut one, mut two) = (0_u64, 0_u64);
    for block in text.chunks(16) {
        let mut bytes = [0; 16];
        bytes[..block.len()].copy_from_slice(block);
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        one ^= word(0).wrapping_mul(FIRST).rotate_left(31).wrapping_mul(SECOND);
        one = one.rotate_left(27).wrapping_add(two).wrapping_mul(5).wrapping_add(0x52dc_e729);
        two ^= word(8).wrapping_mul(SECOND).rotate_left(33).wrapping_mul(FIRST);
        two = two.rotate_left(31).wrapping_add(one).wrapping_mul(5).wrapping_add(0x3849_5ab5);
    }
    one ^= text.len() as u64;
    two ^= text.len() as u64;
    one = one.wrapping_add(two);
    two = two.wrapping_add(one);
    (one, two) = (finish(one), finish(two));
    one = one.wrapping_add(two);
    two = two.wrapping_add(one);
    u128::from(one) << 64 | u128::from(two)
}

fn finish(mut word: u64) -> u64 {
    word = (word ^ word >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
    word = (word ^ word >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    word ^ word >> 33
}
