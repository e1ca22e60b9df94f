-- Precedes each script that checks the checkpoint ("mark"). KEYS[1] meta  [2] due  [3] ended  [4] buckets

-- The numbers of scheduled jobs, of ended jobs, and of buckets.
local function counts()
  return redis.call('ZCARD', KEYS[2]) .. ' ' .. redis.call('ZCARD', KEYS[3]) .. ' ' .. redis.call('SCARD', KEYS[4])
end

-- Removes the checkpoint of an inconsistent shard: a key was lost or changed from outside. The shard is then rebuilt.
local function without_mark()
  redis.call('HDEL', KEYS[1], 'offset', 'at')
  return {false, false}
end

-- The checkpoint, unless the stored counts differ from the actual ones.
local function mark()
  local found = redis.call('HMGET', KEYS[1], 'offset', 'at', 'counts')
  if found[1] and found[3] ~= counts() then
    return without_mark()
  end
  return {found[1], found[2]}
end

