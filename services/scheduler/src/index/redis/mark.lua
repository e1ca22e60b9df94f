-- Before each script that looks at the mark. KEYS[1] meta  [2] due  [3] ended  [4] buckets

-- How many jobs wait, how many have ended, how many buckets hold them.
local function counts()
  return redis.call('ZCARD', KEYS[2]) .. ' ' .. redis.call('ZCARD', KEYS[3]) .. ' ' .. redis.call('SCARD', KEYS[4])
end

-- The shard contradicts itself, so something else has changed it. Without its mark it is built anew.
local function without_mark()
  redis.call('HDEL', KEYS[1], 'offset', 'at')
  return {false, false}
end

-- The mark, unless there is less or more than it is the mark of.
local function mark()
  local found = redis.call('HMGET', KEYS[1], 'offset', 'at', 'counts')
  if found[1] and found[3] ~= counts() then
    return without_mark()
  end
  return {found[1], found[2]}
end

